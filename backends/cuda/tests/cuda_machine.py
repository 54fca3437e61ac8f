"""A machine of files."""

from __future__ import annotations

from pathlib import Path


class Machine:
    """/proc and /dev of a made-up machine."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def driver(self, version: str = "570.86.15") -> Machine:
        file = self.root / "proc/driver/nvidia/version"
        file.parent.mkdir(parents=True)
        file.write_text(f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release\n")
        return self

    def gpus(self, count: int) -> Machine:
        (self.root / "dev").mkdir(exist_ok=True)
        for name in ["nvidiactl", "nvidia-uvm", *(f"nvidia{index}" for index in range(count))]:
            (self.root / "dev" / name).touch()
        return self

    def models(self, *names: str) -> Machine:
        """What the driver writes of each GPU."""
        for index, name in enumerate(names):
            file = self.root / f"proc/driver/nvidia/gpus/0000:{index:02x}:00.0/information"
            file.parent.mkdir(parents=True)
            file.write_text(f"Model: \t\t {name}\nIRQ:   \t\t 16\n")
        return self

    def amd(self, count: int, *, given: int | None = None) -> Machine:
        """The amdgpu driver with a CPU's node and GPUs' nodes; a container may be given fewer."""
        (self.root / "dev/dri").mkdir(parents=True)
        (self.root / "dev/kfd").touch()
        for node in range(count + 1):
            file = self.root / f"sys/class/kfd/kfd/topology/nodes/{node}/properties"
            file.parent.mkdir(parents=True)
            units, minor = (0, 0) if node == 0 else (1216, 127 + node)
            file.write_text(f"cpu_cores_count 0\nsimd_count {units}\ndrm_render_minor {minor}\n")
            if 0 < node <= (count if given is None else given):
                (self.root / f"dev/dri/renderD{minor}").touch()
        return self

    def wsl(self) -> Machine:
        (self.root / "dev").mkdir(exist_ok=True)
        (self.root / "dev/dxg").touch()
        return self

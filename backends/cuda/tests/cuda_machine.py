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

    def wsl(self) -> Machine:
        (self.root / "dev").mkdir(exist_ok=True)
        (self.root / "dev/dxg").touch()
        return self

"""The machine's GPUs, from files and the environment; no torch, no CUDA library.

Those of a torch for ROCm, which calls its devices `cuda` too, are in `rocm`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from accel_core import hooks, implements
from accel_cuda import rocm

if TYPE_CHECKING:
    from accel_core import RunConfig, World

__all__ = ["CudaLaunch", "driver_version", "gpu_count", "lacks_peer_access", "probe", "torch_build"]

VISIBLE = "CUDA_VISIBLE_DEVICES"
ROOT = Path("/")
"""Root of /proc and /dev; tests use a tree of their own."""


def probe() -> str | None:
    """None if a GPU can be expected here, else why not."""
    build = torch_build()
    if build is None:
        return "torch is not installed"
    if build == "hip":
        return rocm.probe(ROOT)
    if build != "cuda":
        return "torch is a CPU build; install one with CUDA (pytorch.org/get-started)"
    if driver_version() is None:
        return "no NVIDIA driver is loaded (there is neither /proc/driver/nvidia nor /dev/dxg)"
    if os.environ.get(VISIBLE) is not None and gpu_count() == 0:
        return f"{VISIBLE}={os.environ[VISIBLE]!r} hides every GPU"
    if gpu_count() == 0:
        return "the NVIDIA driver is loaded, but this machine or container is given no GPU (no /dev/nvidia0)"
    return None


def torch_build() -> str | None:
    """`cuda`, `hip` or `cpu`: what the installed torch was built for.

    None if there is no torch.
    """
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    # Wheels, conda packages and vendors' images number their builds differently; all write this.
    text = Path(spec.origin).with_name("version.py").read_text()
    for build in ("cuda", "hip"):
        if re.search(rf"^{build}\b[^=]*= *['\"]", text, re.MULTILINE):
            return build
    return "cpu"


def driver_version() -> str | None:
    """Version of the kernel module; "unknown" under WSL; None without a driver."""
    file = ROOT / "proc/driver/nvidia/version"
    if file.exists():
        found = re.search(r"\b\d+\.\d+(\.\d+)?\b", file.read_text())
        return found[0] if found else "unknown"
    return "unknown" if (ROOT / "dev/dxg").exists() else None


def gpu_count() -> int:
    """Return the number of GPUs that a process of this environment sees."""
    visible = os.environ.get(VISIBLE)
    # Under WSL no GPU has a node of its own; one is what such machines have.
    there = len(list((ROOT / "dev").glob("nvidia[0-9]*"))) or int((ROOT / "dev/dxg").exists())
    if visible is None:
        return there
    # CUDA reads the list up to the first entry that names no device.
    count = 0
    for entry in visible.split(","):
        if (entry.strip().isdecimal() and int(entry) >= there) or not re.match(r"\s*(\d|GPU-|MIG-)", entry):
            break
        count += 1
    return count


def lacks_peer_access() -> bool:
    """Return True if the driver claims access between GPUs that they lack.

    Several GeForce RTX 40 before driver 550.40.07: NCCL hangs over P2P and InfiniBand (NVIDIA/nccl#1080).
    """
    files = (ROOT / "proc/driver/nvidia/gpus").glob("*/information")
    models = [file.read_text() for file in files]
    parts = [int(part) for part in re.findall(r"\d+", driver_version() or "")]
    return len(models) > 1 and any("RTX 40" in model for model in models) and [0] < parts < [550, 40, 7]


class CudaLaunch:
    """Hooks of the launcher, and of the run before torch's first CUDA call."""

    @implements(hooks.visible_devices)
    def visible_devices(self, config: RunConfig) -> tuple[str, int]:
        return (rocm.visible(), rocm.gpu_count(ROOT)) if torch_build() == "hip" else (VISIBLE, gpu_count())

    @implements(hooks.launch_environment)
    def launch_environment(self, config: RunConfig, world: World) -> Mapping[str, str]:
        options, wanted = config.plugins.get("cuda"), dict[str, str]()
        if getattr(options, "deterministic", False):
            wanted["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS reads it when it is first used
        expandable = getattr(options, "expandable_segments", None)
        if expandable is not None:
            # The name that every torch since 2.8 reads, when it first allocates.
            wanted["PYTORCH_CUDA_ALLOC_CONF"] = f"expandable_segments:{expandable}"
        if world.size > 1:
            # What a collective was waiting for when it timed out: a file a rank (torch's flight recorder).
            wanted |= {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}
            if lacks_peer_access():
                wanted |= {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
        return wanted

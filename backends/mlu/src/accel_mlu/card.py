"""The card and the functions that it names. Imports neither torch nor the vendor's library."""

from __future__ import annotations

import os
import re
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from accel_core import Card

if TYPE_CHECKING:
    from accel_core import RunConfig

__all__ = ["MLU", "device_count", "probe", "visible_devices"]

VISIBLE = "MLU_VISIBLE_DEVICES"
RUNTIME = "libcnrt.so"
NODE = "cambricon_dev"
ROOT = Path("/")
"""Root of /dev and /usr; tests use a tree of their own."""


def probe() -> str | None:
    """Return the reason why no MLU can be used here; None if one can be expected."""
    vendor, torch = _version("torch_mlu"), _version("torch")
    if vendor is None:
        return "torch_mlu is not installed; its source is at github.com/Cambricon/torch_mlu"
    built = re.search(r"\+torch(\d+\.\d+)", vendor)  # 1.22.0+torch2.4.0
    if torch is None or (built and torch.split(".")[:2] != built[1].split(".")):
        return f"torch_mlu {vendor} was not built for torch {torch}; install the torch in its version"
    if not any((folder / RUNTIME).exists() for folder in _libraries()):
        return (
            f"torch_mlu is installed but Cambricon's {RUNTIME} is not found;"
            " install CNToolkit, then set NEUWARE_HOME, or LD_LIBRARY_PATH to its lib64"
        )
    if not _nodes():
        return f"this machine or container is given no MLU (no /dev/{NODE}0)"
    if device_count() == 0:
        return f"{VISIBLE}={os.environ[VISIBLE]!r} hides every MLU"
    return None


def device_count() -> int:
    """Return the number of MLUs that a process of this environment sees."""
    present, visible = _nodes(), os.environ.get(VISIBLE)
    if visible is None:
        return present
    count = 0
    for entry in map(str.strip, visible.split(",")):  # the first entry that is not an MLU ends the list
        if not entry.isdecimal() or int(entry) >= present:
            break
        count += 1
    return count


def _nodes() -> int:
    nodes = (ROOT / "dev").glob(f"{NODE}*")
    return len([node for node in nodes if node.name.removeprefix(NODE).isdecimal()])


def _libraries() -> list[Path]:
    listed = [Path(folder) for folder in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if folder]
    return [*listed, Path(os.environ.get("NEUWARE_HOME", ROOT / "usr/local/neuware")) / "lib64"]


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def visible_devices(config: RunConfig) -> int:
    """Return the number of devices that a process of this environment sees."""
    return device_count()


MLU = Card(
    name="mlu",
    slot="device",
    summary="Cambricon MLUs, each process on one.",
    api_version="1.0",
    priority=100,
    # torch_mlu can pretend that its chips are CUDA devices (torch_mlu.utils.gpu_migration).
    shadows=("native", "cuda"),
    distributed_type="MULTI_MLU",
    torch_device="mlu",
    communication_backend="cncl",
    offers={"bf16", "collectives.torch", "fp16", "memory_stats", "process_per_device", "rng"},
    probe=probe,
    verify="accel_mlu.device:verify",
    visible_devices="accel_mlu.card:visible_devices",
    config="accel_mlu.config:MluConfig",
    implementation="accel_mlu.device:MluDevice",
    environment_report="accel_mlu.device:environment_report",
)

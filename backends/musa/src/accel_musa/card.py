"""The card and the functions that it names. Imports neither torch nor the vendor's library."""

from __future__ import annotations

import os
from importlib import metadata
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from accel_core import Card

if TYPE_CHECKING:
    from accel_core import RunConfig

__all__ = ["MUSA", "device_count", "probe", "visible_devices"]

VISIBLE = "MUSA_VISIBLE_DEVICES"
RUNTIME = "libmusart.so"
ROOT = Path("/")
"""Root of /dev and /usr; tests use a tree of their own."""


def probe() -> str | None:
    """Return the reason why no Moore Threads GPU can be used here; None if one can be expected."""
    vendor, torch = _version("torch_musa"), _version("torch")
    if vendor is None:
        return "torch_musa is not installed; its wheels are at github.com/MooreThreads/torch_musa/releases"
    if torch is None or torch.split(".")[:2] != vendor.split(".")[:2]:
        return f"torch_musa {vendor} was not built for torch {torch}; install the torch of its release"
    if not any((folder / RUNTIME).exists() for folder in _libraries()):
        return (
            f"torch_musa is installed but the MUSA SDK's {RUNTIME} is not found;"
            " install the SDK, then set MUSA_HOME, or LD_LIBRARY_PATH to its lib"
        )
    if not _nodes():
        return "this machine or container is given no Moore Threads GPU (no /dev/mtgpu.0)"
    if device_count() == 0:
        return f"{VISIBLE}={os.environ[VISIBLE]!r} hides every GPU"
    return None


def device_count() -> int:
    """Return the number of GPUs that a process of this environment sees."""
    present, visible = _nodes(), os.environ.get(VISIBLE)
    if visible is None:
        return present
    # The first entry that is not a GPU ends the list.
    listed = takewhile(
        lambda entry: entry.isdecimal() and int(entry) < present, map(str.strip, visible.split(","))
    )
    return len([*listed])


def _nodes() -> int:
    return len([node for node in (ROOT / "dev").glob("mtgpu.*") if node.suffix[1:].isdecimal()])


def _libraries() -> list[Path]:
    listed = [Path(folder) for folder in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if folder]
    return [*listed, Path(os.environ.get("MUSA_HOME", ROOT / "usr/local/musa")) / "lib"]


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def visible_devices(config: RunConfig) -> int:
    """Return the number of devices that a process of this environment sees."""
    return device_count()


MUSA = Card(
    name="musa",
    slot="device",
    summary="Moore Threads GPUs, each process on one.",
    api_version="1.0",
    priority=100,
    shadows=("native",),
    distributed_type="MULTI_MUSA",
    torch_device="musa",
    communication_backend="mccl",
    offers={"bf16", "collectives.torch", "fp16", "memory_stats", "process_per_device", "rng"},
    probe=probe,
    verify="accel_musa.device:verify",
    visible_devices="accel_musa.card:visible_devices",
    config="accel_musa.config:MusaConfig",
    implementation="accel_musa.device:MusaDevice",
    environment_report="accel_musa.device:environment_report",
)

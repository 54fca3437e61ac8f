"""The card and the functions that it names. Imports neither torch nor the vendor's library."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from accel_core import Card

if TYPE_CHECKING:
    from accel_core import RunConfig

__all__ = ["SDAA", "device_count", "probe", "visible_devices"]

VISIBLE = "SDAA_VISIBLE_DEVICES"
NODE = "tcaicard"
NODES = Path("/dev")
"""Folder of device files; tests use another folder."""


def probe() -> str | None:
    """Return the reason why no SDAA device can be used here; None if one can be expected."""
    if find_spec("torch_sdaa") is None:
        return "torch_sdaa is not installed; ask Tecorigin for it"
    if not _nodes():
        return f"this machine or container is given no SDAA device (no {NODES}/{NODE}0)"
    if device_count() == 0:
        return f"{VISIBLE}={os.environ[VISIBLE]!r} hides every SDAA device"
    return None


def device_count() -> int:
    """Return the number of devices that a process of this environment sees."""
    present, visible = _nodes(), os.environ.get(VISIBLE)
    if visible is None:
        return present
    # The runtime's rules for longer lists are not published. Entries beyond the devices are not counted.
    return min(present, len([entry for entry in visible.split(",") if entry.strip()]))


def _nodes() -> int:
    return len([node for node in NODES.glob(f"{NODE}*") if node.name.removeprefix(NODE).isdecimal()])


def visible_devices(config: RunConfig) -> int:
    """Return the number of devices that a process of this environment sees."""
    return device_count()


SDAA = Card(
    name="sdaa",
    slot="device",
    summary="Tecorigin SDAA devices, each process on one; unverified: the vendor's source is not public.",
    api_version="1.0",
    priority=100,
    # torch_sdaa can pretend that its chips are CUDA devices (torch_sdaa.utils.cuda_migrate).
    shadows=("native", "cuda"),
    distributed_type="MULTI_SDAA",
    torch_device="sdaa",
    communication_backend="tccl",
    offers={"bf16", "collectives.torch", "fp16", "memory_stats", "process_per_device", "rng"},
    probe=probe,
    verify="accel_sdaa.device:verify",
    visible_devices="accel_sdaa.card:visible_devices",
    implementation="accel_sdaa.device:SdaaDevice",
    environment_report="accel_sdaa.device:environment_report",
)

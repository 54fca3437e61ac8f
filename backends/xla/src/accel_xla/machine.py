"""The machine's XLA devices, read from files and the environment without torch_xla."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import metadata
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from accel_core import RunConfig, World

__all__ = ["chip_count", "hardware", "launch_environment", "probe", "spmd_environment", "visible_devices"]

DEVICE: Final = "PJRT_DEVICE"
CPU_DEVICES: Final = "CPU_NUM_DEVICES"
LAST: Final = "2.9"
"""The last torch that torch_xla was released for."""
GOOGLE: Final = "0x1ae0"
TPUS: Final = ("0x0027", "0x005e", "0x0063", "0x006f", "0x0076")
"""PCI ids in torch_xla's list: v2 and v3, v4, v5e, v6e, 7x."""
TPU_MASK: Final = "TPU_VISIBLE_CHIPS"
NEURONS: Final = "sys/devices/virtual/neuron_device"
ROOT = Path("/")
"""Root of /dev and /sys; tests use a tree of their own."""


def probe() -> str | None:
    """Return the reason why torch_xla cannot be used here; None if it can, on its CPU device at least."""
    torch, vendor = _version("torch"), _version("torch_xla")
    if vendor is None:
        return f"torch-xla is not installed; {_install(torch)}"
    if torch is None or _minor(torch) != _minor(vendor):
        return f"torch-xla {vendor} was not built for torch {torch}; {_install(torch)}"
    return None


def hardware() -> str | None:
    """Return the PJRT device whose hardware this machine has; None if it has none that this package knows."""
    if _tpus():
        return "TPU"
    return "NEURON" if (ROOT / "dev/neuron0").exists() else None


def chip_count() -> int:
    """Return the number of processes, one per device, as torch_xla counts them."""
    kind = os.environ.get(DEVICE) or hardware()
    if kind == "TPU":
        return _tpu_processes()
    if kind == "NEURON":
        return _neuron_cores()
    return 1  # torch_xla's CPU device supports one process


def _tpu_processes() -> int:
    if os.environ.get(TPU_MASK):
        return 1  # torch_xla gives every process all visible chips if a mask is set
    bounds = os.environ.get("TPU_PROCESS_BOUNDS")
    return min(_tpus(), prod(map(int, bounds.split(",")))) if bounds else _tpus()


def _neuron_cores() -> int:
    if visible := os.environ.get("NEURON_RT_VISIBLE_CORES"):
        ends = [part.split("-") for part in visible.split(",")]
        return sum(int(last) - int(first) + 1 for first, *_, last in ([*end, end[-1]] for end in ends))
    if count := os.environ.get("NEURON_RT_NUM_CORES"):
        return int(count)
    return sum(int(file.read_text()) for file in (ROOT / NEURONS).glob("neuron*/core_count"))


def _tpus() -> int:
    count = 0
    for vendor in (ROOT / "sys/bus/pci/devices").glob("*/vendor"):
        if vendor.read_text().strip() == GOOGLE:
            count += (vendor.parent / "device").read_text().strip() in TPUS
    return count


def _install(torch: str | None) -> str:
    pair = _minor(torch) if torch and _minor(torch) <= _minor(LAST) else _minor(LAST)
    version = ".".join(map(str, pair))
    extra = "[tpu]" if _tpus() else ""
    return f"pip install 'torch=={version}.*' 'torch-xla{extra}=={version}.*'"


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def visible_devices(config: RunConfig) -> int:
    """Return the number of devices that a process of this environment sees."""
    return 1 if config.strategy == "xla-spmd" else chip_count()


def launch_environment(config: RunConfig, world: World) -> Mapping[str, str]:
    """Return the environment variables that torch_xla reads when it is imported."""
    kind = getattr(config.plugins.get("xla"), "pjrt_device", None) or hardware()
    return {DEVICE: kind} if kind else {}


def spmd_environment(config: RunConfig, world: World) -> Mapping[str, str]:
    """Return the environment variables of SPMD that torch_xla reads when it is imported."""
    count = getattr(config.plugins.get("xla-spmd"), "cpu_devices", None)
    return {CPU_DEVICES: str(count)} if count else {}

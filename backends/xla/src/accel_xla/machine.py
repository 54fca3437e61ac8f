"""What this machine has, from files and the environment alone: no torch, no torch_xla."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

from accel_core import hooks, implements

if TYPE_CHECKING:
    from accel_core import RunConfig, World

__all__ = ["SpmdLaunch", "XlaLaunch", "chip_count", "hardware", "probe"]

DEVICE: Final = "PJRT_DEVICE"
CPU_DEVICES: Final = "CPU_NUM_DEVICES"
LAST: Final = "2.9"
"""The last torch that torch_xla was released for."""
GOOGLE: Final = "0x1ae0"
TPUS: Final = ("0x0027", "0x005e", "0x0063", "0x006f", "0x0076")
"""PCI ids, as torch_xla knows them: v2 and v3, v4, v5e, v6e, 7x."""
ROOT = Path("/")
"""Where /dev and /sys are; tests have a tree of their own."""


def probe() -> str | None:
    """None if torch_xla can be used here, be it on its CPU device; else why not."""
    torch, vendor = _version("torch"), _version("torch_xla")
    if vendor is None:
        return f"torch-xla is not installed; {_install(torch)}"
    if torch is None or _minor(torch) != _minor(vendor):
        return f"torch-xla {vendor} was built for another torch than {torch}; {_install(torch)}"
    return None


def hardware() -> str | None:
    """The PJRT device whose hardware is here; None if there is none that this package knows."""
    if _tpus():
        return "TPU"
    return "NEURON" if (ROOT / "dev/neuron0").exists() else None


def chip_count() -> int:
    """How many processes, one a device, this machine can hold."""
    kind = os.environ.get(DEVICE) or hardware()
    if kind == "TPU":
        return len((os.environ.get("TPU_VISIBLE_CHIPS") or "").split(",")) if _masked() else _tpus()
    if kind == "NEURON":
        return int(os.environ.get("NEURON_RT_NUM_CORES") or 0) or len([*(ROOT / "dev").glob("neuron*")])
    return 1  # torch_xla gives its CPU device to one process only


def _masked() -> bool:
    return bool(os.environ.get("TPU_VISIBLE_CHIPS"))


def _tpus() -> int:
    found = 0
    for vendor in (ROOT / "sys/bus/pci/devices").glob("*/vendor"):
        if vendor.read_text().strip() == GOOGLE:
            found += (vendor.parent / "device").read_text().strip() in TPUS
    return found


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


class XlaLaunch:
    """What the launcher, and the run before torch_xla is imported, ask of this device."""

    @implements(hooks.visible_devices)
    def visible_devices(self, config: RunConfig) -> tuple[str, int]:
        return "TPU_VISIBLE_CHIPS", 1 if config.strategy == "xla-spmd" else chip_count()

    @implements(hooks.launch_environment)
    def launch_environment(self, config: RunConfig, world: World) -> Mapping[str, str]:
        kind = getattr(config.plugins.get("xla"), "pjrt_device", None) or hardware()
        return {DEVICE: kind} if kind else {}


class SpmdLaunch:
    """What the strategy `xla-spmd` needs before torch_xla is imported."""

    @implements(hooks.launch_environment)
    def launch_environment(self, config: RunConfig, world: World) -> Mapping[str, str]:
        count = getattr(config.plugins.get("xla-spmd"), "cpu_devices", None)
        return {CPU_DEVICES: str(count)} if count else {}

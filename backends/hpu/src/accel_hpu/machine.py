"""The machine's HPUs, read from files and the environment without torch or a Gaudi library."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accel_core import RunConfig, World

__all__ = ["hpu_count", "launch_environment", "probe", "visible_devices"]

VISIBLE = "HABANA_VISIBLE_MODULES"
LAZY = "PT_HPU_LAZY_MODE"
ROOT = Path("/")
"""Root of /dev and /sys; tests use a tree of their own."""


def probe() -> str | None:
    """Return the reason why no HPU can be used here; None if one can be expected."""
    if find_spec("habana_frameworks") is None:
        return "habana_frameworks is not installed; use Gaudi's own image, or its habanalabs-installer"
    if not (ROOT / "sys/module/habanalabs").is_dir():
        return "habana_frameworks is installed, but the kernel's habanalabs driver is not loaded"
    if not _modules():
        return "the habanalabs driver is loaded, but this machine or container is given no HPU (/dev/accel)"
    if hpu_count() == 0:
        return f"{VISIBLE}={os.environ[VISIBLE]!r} hides every HPU"
    return None


def hpu_count() -> int:
    """Return the number of HPUs that a process of this environment sees."""
    visible = os.environ.get(VISIBLE)
    if visible is None:
        return _modules()
    named = {entry.strip() for entry in visible.split(",") if entry.strip().isdecimal()}
    return min(len(named), _modules())


def _modules() -> int:
    # accel0 is a device file; accel_controlD0 is its control file and is not counted.
    return len([node for node in (ROOT / "dev/accel").glob("accel*") if node.name[5:].isdecimal()])


def visible_devices(config: RunConfig) -> int:
    """Return the number of devices that a process of this environment sees."""
    return hpu_count()


def launch_environment(config: RunConfig, world: World) -> Mapping[str, str]:
    """Return the environment variables that the vendor's library reads when it is imported."""
    lazy = getattr(config.plugins.get("hpu"), "lazy", None)
    # For Gaudi's DeepSpeed. Accelerate sets this variable too, for each run on HPUs (prepare_deepspeed).
    wanted = {"DEEPSPEED_USE_HPU": "true"}
    return wanted if lazy is None else {**wanted, LAZY: str(int(lazy))}

"""The machine's HPUs, from files and the environment; no torch, no Gaudi library."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from accel_core import hooks, implements

if TYPE_CHECKING:
    from accel_core import RunConfig, World

__all__ = ["HpuLaunch", "hpu_count", "probe"]

VISIBLE = "HABANA_VISIBLE_MODULES"
LAZY = "PT_HPU_LAZY_MODE"
ROOT = Path("/")
"""Root of /dev and /sys; tests use a tree of their own."""


def probe() -> str | None:
    """None if an HPU can be expected here, else why not."""
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
    # accel0 is the device, accel_controlD0 its control node.
    return len([node for node in (ROOT / "dev/accel").glob("accel*") if node.name[5:].isdecimal()])


class HpuLaunch:
    """Hooks of the launcher, and of the run before Gaudi's software is imported."""

    @implements(hooks.visible_devices)
    def visible_devices(self, config: RunConfig) -> tuple[str, int]:
        return VISIBLE, hpu_count()

    @implements(hooks.launch_environment)
    def launch_environment(self, config: RunConfig, world: World) -> Mapping[str, str]:
        lazy = getattr(config.plugins.get("hpu"), "lazy", None)
        # Gaudi's DeepSpeed reads it; Accelerate sets it for each run on HPUs (prepare_deepspeed).
        wanted = {"DEEPSPEED_USE_HPU": "true"}
        return wanted if lazy is None else {**wanted, LAZY: str(int(lazy))}

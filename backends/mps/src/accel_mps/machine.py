"""The machine's Apple GPU, found without importing torch."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accel_core import RunConfig, World

__all__ = ["launch_environment", "probe", "visible_devices"]

FALLBACK = "PYTORCH_ENABLE_MPS_FALLBACK"
OLDEST = 14
"""Oldest release of macOS that torch's wheels support."""


def probe() -> str | None:
    """Return the reason why no Apple GPU can be used here; None if one can be expected."""
    if platform.system() != "Darwin":
        return f"this is {platform.system() or 'an unknown system'}, not macOS"
    if platform.machine() != "arm64":
        return f"this Python runs on {platform.machine()}; use an arm64 Python (not under Rosetta)"
    release = platform.mac_ver()[0]
    if int(release.partition(".")[0] or 0) < OLDEST:
        return f"macOS {release} is too old for torch's Metal kernels, which need {OLDEST}"
    return None if find_spec("torch") else "torch is not installed"


def visible_devices(config: RunConfig) -> int:
    """Return the number of devices that a process of this environment sees."""
    return 1  # a Mac has one GPU, and no variable hides it


def launch_environment(config: RunConfig, world: World) -> Mapping[str, str]:
    """Return the environment variables that the vendor's library reads when it is imported."""
    wanted = getattr(config.plugins.get("mps"), "cpu_fallback", False)
    return {FALLBACK: "1"} if wanted else {}

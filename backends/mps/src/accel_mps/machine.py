"""The machine's GPU, without torch."""

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
"""macOS that torch's wheels ask for."""


def probe() -> str | None:
    """None if an Apple GPU can be expected here, else why not."""
    if platform.system() != "Darwin":
        return f"this is {platform.system() or 'an unknown system'}, not macOS"
    if platform.machine() != "arm64":
        return f"this Python runs on {platform.machine()}; an arm64 one is needed (not under Rosetta)"
    release = platform.mac_ver()[0]
    if int(release.partition(".")[0] or 0) < OLDEST:
        return f"macOS {release} is too old for torch's Metal kernels, which need {OLDEST}"
    return None if find_spec("torch") else "torch is not installed"


def visible_devices(config: RunConfig) -> int:
    """Return the number of devices that a process of this environment sees."""
    return 1  # one GPU, which nothing masks


def launch_environment(config: RunConfig, world: World) -> Mapping[str, str]:
    """Return the variables that are read when the vendor's library is imported."""
    wanted = getattr(config.plugins.get("mps"), "cpu_fallback", False)
    return {FALLBACK: "1"} if wanted else {}

"""The machine's GPU, without torch."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

from accel_core import hooks, implements

if TYPE_CHECKING:
    from accel_core import RunConfig, World

__all__ = ["MpsLaunch", "probe"]

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


class MpsLaunch:
    """Hooks before torch is imported."""

    @implements(hooks.visible_devices)
    def visible_devices(self, config: RunConfig) -> tuple[str, int]:
        return "", 1  # one GPU, which nothing masks

    @implements(hooks.launch_environment)
    def launch_environment(self, config: RunConfig, world: World) -> Mapping[str, str]:
        wanted = getattr(config.plugins.get("mps"), "cpu_fallback", False)
        return {FALLBACK: "1"} if wanted else {}

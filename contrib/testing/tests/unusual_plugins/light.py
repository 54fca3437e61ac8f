"""What the launcher may load of the device `early`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def launch_environment(config: Any, world: Any) -> Mapping[str, str]:
    return {"STRANGE_VENDOR_MODE": "training"}

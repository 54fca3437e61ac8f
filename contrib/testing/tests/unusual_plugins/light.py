"""What the launcher may load of the device `early`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Launch:
    def launch_environment(self, config: Any) -> Mapping[str, str]:
        return {"STRANGE_VENDOR_MODE": "training"}

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def launch_environment(config: Any, world: Any) -> Mapping[str, str]:
    import numpy as np  # noqa: F401

    return {}

"""Stands for the vendor's library: once it is imported, torch knows the device type.

Yours would be `import torch_acme`, or nothing where torch itself knows the type.
"""

from __future__ import annotations

import os
from typing import Final

from accel_core.testing.simulated.device import simulate

__all__ = ["log_level"]

simulate("example", communication="exccl")

log_level: Final = int(os.environ.get("EXAMPLE_LOG_LEVEL", "0"))
"""Read when imported, as vendors do: `launch_environment` has set it by then."""

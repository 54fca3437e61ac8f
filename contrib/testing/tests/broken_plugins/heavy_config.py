from __future__ import annotations

import numpy as np
from attrs import frozen

from accel_core import option


@frozen(kw_only=True)
class Config:
    """Options whose default needs a third party."""

    size: int = option(int(np.int64(3)), help="A number.")

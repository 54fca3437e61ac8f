"""Names of the files in Accelerate's own checkpoints."""

from __future__ import annotations

from accel_compat.refusing import unserved

from .utils.constants import (
    MODEL_NAME,
    OPTIMIZER_NAME,
    RNG_STATE_NAME,
    SAFE_MODEL_NAME,
    SAFE_WEIGHTS_NAME,
    SAMPLER_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
    WEIGHTS_NAME,
)

__getattr__ = unserved(__name__)

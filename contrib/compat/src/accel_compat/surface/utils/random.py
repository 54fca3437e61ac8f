"""Seeds and random streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accel_compat import runs
from accel_compat.refusing import unserved
from accel_core import set_seed as _set_seed
from accel_core import synchronize_rng_state as _synchronize_one

from .constants import CUDA_DISTRIBUTED_TYPES


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed `random`, numpy, torch and the device; `device_specific`: another seed on each rank."""
    if not 0 <= seed < 2**32:
        raise ValueError("Seed must be between 0 and 2**32 - 1")
    run = runs.host(False) if device_specific else runs.newest()
    _set_seed(seed, device_specific, deterministic, run=run)


def synchronize_rng_state(rng_type: Any = None, generator: Any = None) -> None:
    """Give all ranks rank 0's stream. Collective."""
    run = runs.newest()
    if run is not None and run.world.size > 1:
        _synchronize_one(str(getattr(rng_type, "value", rng_type)), generator, run=run)


def synchronize_rng_states(rng_types: Sequence[Any], generator: Any = None) -> None:
    """As `synchronize_rng_state`, for several."""
    for rng_type in rng_types:
        synchronize_rng_state(rng_type, generator)


__getattr__ = unserved(__name__)

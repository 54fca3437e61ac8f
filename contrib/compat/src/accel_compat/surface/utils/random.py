"""Seeds and random streams."""

from accel_compat.state.operations import set_seed, synchronize_rng_state, synchronize_rng_states

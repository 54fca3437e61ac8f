"""`accelerate`, as programs import it; what runs is accel-core."""

from accel_compat.activation import VERSION as __version__

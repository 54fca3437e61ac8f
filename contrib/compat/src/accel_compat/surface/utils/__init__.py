"""`accelerate.utils`."""

from accel_compat.environment.libraries import is_ipex_available

"""Models quantised by bitsandbytes."""

from accel_compat.big_models.quantising import *

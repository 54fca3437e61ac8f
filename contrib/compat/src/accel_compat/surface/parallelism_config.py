"""ParallelismConfig."""

from accel_compat.configs.parallelism import *

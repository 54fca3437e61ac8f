"""Files of weights and optimizer states that FSDP shards."""

from accel_compat.modeling.fsdp_files import *

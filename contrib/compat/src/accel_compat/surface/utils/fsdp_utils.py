"""Files of weights and optimizer states that FSDP shards."""

from accel_compat.launch.weight_merging import merge_fsdp_weights
from accel_compat.modeling.fsdp_files import *

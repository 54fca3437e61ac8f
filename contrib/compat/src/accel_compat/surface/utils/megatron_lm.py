"""Stand-ins and train steps of Megatron."""

from accel_compat.modeling.megatron_steps import *

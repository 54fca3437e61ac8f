"""Enums and config classes."""

from accel_compat.configs.deepspeed import *
from accel_compat.configs.enums import *
from accel_compat.configs.fsdp import *
from accel_compat.configs.handlers import *
from accel_compat.configs.low_precision import *
from accel_compat.configs.megatron import *
from accel_compat.configs.parallelism import *

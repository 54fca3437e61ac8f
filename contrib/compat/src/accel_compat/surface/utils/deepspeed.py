"""DeepSpeed's configuration, and stand-ins for what its JSON describes."""

from accel_compat.configs.deepspeed_json import *

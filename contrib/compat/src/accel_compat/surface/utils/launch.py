"""Command lines and variables of workers."""

from accel_compat.launch.worker_commands import *
from accel_compat.launch.worker_commands import _convert_nargs_to_dict

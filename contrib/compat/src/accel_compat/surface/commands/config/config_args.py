"""Config files as objects."""

from accel_compat.launch.config_file import *

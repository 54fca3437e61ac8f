"""The oldest home of the kwargs handlers."""

from accel_compat.configs.handlers import *

"""Launching a function in several processes."""

from accel_compat.launch.notebook import *

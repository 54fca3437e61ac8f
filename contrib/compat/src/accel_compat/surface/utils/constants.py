"""File names, choices and versions."""

from accel_compat.environment.constants import *

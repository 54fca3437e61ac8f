"""Environment variables, and facts about the machine."""

from accel_compat.environment.variables import *

"""Giving memory back, and finding the batch size that fits."""

from accel_compat.state.memory import *
from accel_core import release_memory

"""Accelerator."""

from accel_compat.accelerator.accelerator import *

"""Offload folders."""

from accel_compat.big_models.offload_folder import *

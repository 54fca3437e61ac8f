"""Hooks around a module's forward."""

from accel_compat.big_models.aligning import *
from accel_compat.big_models.cpu_offload import CpuOffload, UserCpuOffloadHook
from accel_compat.big_models.hooks import *
from accel_compat.big_models.layerwise_casting import LayerwiseCastingHook

"""Layers that torchao converts to fp8."""

from accel_compat.modeling.float8_layers import *

"""Wrapped and compiled models, files, ports."""

from accel_compat.modeling.wrappers import *

"""Wrapped and compiled models, files, ports."""

from accel_compat.modeling.regional_compilation import *
from accel_compat.modeling.wrappers import *

"""Trackers."""

from accel_compat.trackers.base import *
from accel_compat.trackers.libraries import *
from accel_compat.trackers.model_libraries import *
from accel_compat.trackers.registry import *

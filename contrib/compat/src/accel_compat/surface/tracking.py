"""Trackers."""

from accel_compat.trackers.base import *
from accel_compat.trackers.libraries import *
from accel_compat.trackers.registry import *
from accel_compat.trackers.tensorboard import *

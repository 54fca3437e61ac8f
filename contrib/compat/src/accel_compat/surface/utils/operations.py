"""Collectives and helpers over nested structures."""

from accel_compat.state.operations import *

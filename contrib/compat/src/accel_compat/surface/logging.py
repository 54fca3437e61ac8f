"""Loggers that know the rank."""

from accel_compat.state.output import MultiProcessAdapter, get_logger

"""The schedulers that `prepare` returns."""

from accel_compat.accelerator.prepared import AcceleratedScheduler

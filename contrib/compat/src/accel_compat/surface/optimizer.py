"""The optimizers that `prepare` returns."""

from accel_compat.accelerator.prepared import AcceleratedOptimizer, move_to_device

"""Local SGD."""

from accel_compat.accelerator.stepping import LocalSGD

"""Local SGD."""

from accel_core import LocalSGD

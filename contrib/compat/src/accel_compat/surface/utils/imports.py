"""Availability of libraries and devices."""

from accel_compat.environment.libraries import *
from accel_compat.environment.libraries import _is_package_available

"""Helpers for the tests of libraries."""

from accel_compat.test_support.cases import *
from accel_compat.test_support.commands import *
from accel_compat.test_support.skipping import *

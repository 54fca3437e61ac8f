"""Helpers for the tests of libraries."""

from accelerate.test_utils.testing import *

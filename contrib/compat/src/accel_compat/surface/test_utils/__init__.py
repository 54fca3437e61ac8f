"""Helpers for the tests of libraries."""

from .testing import *

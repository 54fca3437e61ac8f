"""Deadlines of tests, longer on a slow or busy machine."""

from __future__ import annotations

import os
from typing import Final

__all__ = ["PATIENCE", "patience"]

PATIENCE: Final = "ACCEL_TEST_PATIENCE"
"""Variable by whose number each deadline of a test is multiplied; 1 if unset."""


def patience(seconds: float) -> float:
    """Return the deadline that this machine needs, in seconds.

    `seconds` is the deadline on an idle machine. A deadline that a test reaches on purpose is not multiplied.
    """
    return seconds * float(os.environ.get(PATIENCE) or 1)

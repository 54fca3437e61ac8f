"""From objects to units, and the steps of a unit."""

from __future__ import annotations

"""Stands for what Gaudi's software tells of itself."""

from __future__ import annotations


def is_lazy() -> bool:
    return True

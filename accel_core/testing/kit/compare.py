"""How near two training runs must be to count as the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

__all__ = ["assert_near", "assert_same_training"]

RELATIVE, ABSOLUTE = 1e-4, 1e-5
"""float32 after some twenty steps, over devices that add in another order from run to run."""


def assert_same_training(ours: Any, plain: Any) -> None:
    """Equal traces: losses, gradient norms, learning rates, skipped steps, final weights."""
    assert ours.skipped == plain.skipped or not plain.skipped, "other steps were skipped"
    for name in ("losses", "norms", "rates", "weights"):
        assert_near(name, getattr(ours, name), getattr(plain, name))


def assert_near(name: str, found: Sequence[float], expected: Sequence[float]) -> None:
    """Numbers equal but for rounding; says where they part."""
    assert len(found) == len(expected), f"{len(found)} {name}, the plain loop has {len(expected)}"
    for number, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert mine == pytest.approx(theirs, rel=RELATIVE, abs=ABSOLUTE, nan_ok=True), (
            f"{name}: number {number} of {len(found)} is {mine:.7g}, the plain loop has {theirs:.7g}"
        )

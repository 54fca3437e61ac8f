"""The tolerances within which two training runs are the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

__all__ = ["assert_near", "assert_same_training"]

RELATIVE, ABSOLUTE = 1e-4, 1e-5
"""For float32 after twenty steps, on devices whose sums vary in order."""
LOW_RELATIVE, LOW_ABSOLUTE = 2e-2, 1e-2
"""For half precision, where two half batches round otherwise than one."""


def assert_same_training(ours: Any, plain: Any, *, low_precision: bool = False) -> None:
    """Compare losses, gradient norms, rates, skipped steps and final weights."""
    assert ours.skipped == plain.skipped or not plain.skipped, "other steps were skipped"
    for name in ("losses", "norms", "rates", "weights"):
        pair = [getattr(each, name) for each in (ours, plain)]
        if name == "norms":  # of gradients that overflow: infinite, or none where infinities meet
            pair = [[norm if math.isfinite(norm) else math.inf for norm in each] for each in pair]
        assert_near(name, *pair, low_precision=low_precision)


def assert_near(
    name: str, found: Sequence[float], expected: Sequence[float], *, low_precision: bool = False
) -> None:
    """Numbers equal but for rounding; says where they part."""
    assert len(found) == len(expected), f"{len(found)} {name}, the plain loop has {len(expected)}"
    relative, absolute = (LOW_RELATIVE, LOW_ABSOLUTE) if low_precision else (RELATIVE, ABSOLUTE)
    for number, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert mine == pytest.approx(theirs, rel=relative, abs=absolute, nan_ok=True), (
            f"{name}: number {number} of {len(found)} is {mine:.7g}, the plain loop has {theirs:.7g}"
        )

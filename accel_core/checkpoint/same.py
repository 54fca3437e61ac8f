"""Compare values of a state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def is_same(one: Any, other: Any) -> bool:
    """Compare two values of state, element by element; nan is the same as nan."""
    if one is other:
        return True
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and type(one) is type(other):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other) or _is_same_with_nan(one, other)
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.array_equal(one, other) or _is_same_with_nan(one, other)
    try:
        return bool(one == other) or bool(one != one and other != other)  # noqa: PLR0124  # nan
    except (RuntimeError, TypeError, ValueError):  # of several elements, beside a number
        return False


def _is_same_with_nan(one: Any, other: Any) -> bool:
    kind = Tensor if isinstance(one, Tensor) else type(one)  # a parameter may be the same as a tensor
    if not isinstance(other, kind) or (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())  # noqa: PLR0124  # nan

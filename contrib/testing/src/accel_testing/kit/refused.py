"""Leave out features of the awkward model that a stack refuses by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from accel_testing.kit.awkward import LAYERS

__all__ = ["accepted"]

FEATURES = tuple(LAYERS)


def accepted(run: Callable[..., list[Any]], task: Callable[..., Any], *args: Any, world: int) -> Any:
    """Run `task(*args, without)` until no feature of the model is refused.

    A refusal that names no feature fails the check: so does one of a feature that is left out already.
    """
    without: frozenset[str] = frozenset()
    while True:
        found = run(task, *args, without, world=world)
        said = [each for each in found if isinstance(each, str)]
        if not said:
            return found, without
        named = {name for name in FEATURES if any(re.search(rf"\b{name}\b", each) for each in said)}
        if named <= without:
            pytest.fail(f"no feature of the model is named: {said[0]}", pytrace=False)
        without |= named

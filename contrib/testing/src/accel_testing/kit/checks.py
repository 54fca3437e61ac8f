"""Marks of a check: the slots that influence it, the words it needs, its version, and if it is quick.

`pytestmark = concerns("device", "strategy")` is of all checks of a module. A check of other slots has a mark
of its own, which counts instead: `@concerns("device")`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import pytest

from accel_core import API_VERSION, CAPABILITIES
from accel_testing.kit.stack import SLOTS

__all__ = [
    "FIRST_VERSION",
    "concerns",
    "is_check",
    "is_newer",
    "is_quick",
    "level_of",
    "name_of",
    "quick",
    "requires",
    "since",
    "slots_of",
    "version_of",
    "words_of",
]

FIRST_VERSION: Final = "1.0"
"""The version of the contract in which a check without `since` came."""
_FOLDER = Path(__file__).parent

quick = pytest.mark.accel_quick
"""Mark a check, or one of its parameters, that --accel-quick keeps of levels 2 to 4."""


def concerns(*slots: str) -> pytest.MarkDecorator:
    """Mark a check, or by `pytestmark` a module, with slots that influence it."""
    unknown = set(slots) - set(SLOTS)
    assert slots, "a check that no slot influences is not a check of plugins"
    assert not unknown, unknown
    return pytest.mark.accel_concerns(frozenset(slots))


def requires(*words: str) -> pytest.MarkDecorator:
    """Mark a check that only a stack offering these capability words has to pass."""
    unknown = set(words) - CAPABILITIES.keys()
    assert not unknown, unknown
    return pytest.mark.accel_requires(frozenset(words))


def since(version: str) -> pytest.MarkDecorator:
    """Mark a check of a promise that came with this version of the contract."""
    return pytest.mark.accel_since(version)


# -- read by the kit -----------------------------------------------------------------------------


def is_check(item: Any) -> bool:
    """Tell a check of the kit from another test of the session."""
    return _FOLDER in item.path.parents


def name_of(item: pytest.Item) -> str:
    """Return file, function and parameters, as files of known failures have them."""
    return item.nodeid.rpartition("/")[2]


def level_of(item: pytest.Item) -> int:
    """Return the level, which the name of the check's file has."""
    found = re.match(r"test_(\d)_", item.path.name)
    assert found is not None, item.path
    return int(found[1])


def slots_of(item: pytest.Item) -> frozenset[str]:
    """Return the slots whose plugins can influence the check."""
    mark = item.get_closest_marker("accel_concerns")
    assert mark is not None, f"{name_of(item)}: no slot is named, as in pytestmark = concerns('device')"
    slots: frozenset[str] = mark.args[0]
    return slots


def words_of(item: pytest.Item) -> frozenset[str]:
    """Return the capability words that a stack must offer for the check to count."""
    return frozenset().union(*(mark.args[0] for mark in item.iter_markers("accel_requires")))


def version_of(item: pytest.Item) -> str:
    """Return the version of the contract in which the check came."""
    mark = item.get_closest_marker("accel_since")
    return FIRST_VERSION if mark is None else str(mark.args[0])


def is_newer(version: str, other: str = API_VERSION) -> bool:
    """Compare two versions of the contract."""
    first, second = (tuple(map(int, text.split("."))) for text in (version, other))
    return first > second


def is_quick(item: pytest.Item) -> bool:
    """Tell if --accel-quick keeps the check: of levels 0 and 1 all are kept."""
    return level_of(item) <= 1 or item.get_closest_marker("accel_quick") is not None

"""The facts for level 0: a plugin's light parts, in a fresh interpreter.

Run as `python -m accel_testing.kit.tasks_packaging NAME DISTRIBUTION`; prints JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import attrs

from accel_core import (
    Card,
    RunConfig,
    World,
    implements,  # noqa: F401 - part of what every plugin's card may load
)

__all__ = ["facts"]


def facts(name: str, distribution: str) -> dict[str, Any]:
    """Load card, probe, config and the launcher's functions in this order, and describe each."""
    card, target = _card(name, distribution)
    loaded = _Loaded(target)
    found: dict[str, Any] = {"card": {"loads": loaded.since()}, "typed": _type_marker(target)}
    found["probe"] = {**_probe(card), "loads": loaded.since()}
    if card.config is not None:
        found["config"] = {**_config(_load(card.config)), "loads": loaded.since()}
    if card.launch_environment is not None:
        answer = _load(card.launch_environment)(RunConfig(), World())
        found["launch_environment"] = {"is_right": _is_environment(answer), "loads": loaded.since()}
    if card.visible_devices is not None:
        answer = _load(card.visible_devices)(RunConfig())
        found["visible_devices"] = {"is_right": _is_count(answer), "loads": loaded.since()}
    return found


def _card(name: str, distribution: str) -> tuple[Card, str]:
    for point in metadata.distribution(distribution).entry_points:
        if point.name == name and point.group.startswith("accel_core."):
            card = point.load()
            assert isinstance(card, Card), f"{point.value} is not a Card"
            return card, point.module
    raise AssertionError(f"{distribution} has no entry point {name!r}")


class _Loaded:
    """Third-party packages that imports have brought in."""

    def __init__(self, target: str) -> None:
        self.known = {target.partition(".")[0], *sys.stdlib_module_names, *_BASELINE}

    def since(self) -> list[str]:
        """Return the packages that were loaded since the last call."""
        tops = {name.partition(".")[0] for name in sys.modules} - self.known
        self.known |= tops
        return sorted(top for top in tops if not top.startswith("_"))


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def _type_marker(target: str) -> bool:
    spec = find_spec(target.partition(".")[0])
    assert spec is not None
    folders = spec.submodule_search_locations or ()
    return any((Path(folder) / "py.typed").exists() for folder in folders)


def _probe(card: Card) -> dict[str, Any]:
    if card.probe is None:
        return {"seconds": 0.0, "answer": "NoneType"}
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        answer = card.probe()
        seconds.append(time.perf_counter() - started)
    return {"seconds": min(seconds), "answer": type(answer).__name__}


def _config(cls: type) -> dict[str, Any]:
    if not attrs.has(cls):
        return {"attrs": False}
    fields = attrs.fields(cls)
    built = cls()
    return {
        "attrs": True,
        "frozen": _refuses_change(built, fields),
        "positional": [each.name for each in fields if not each.kw_only],
        "helpless": [each.name for each in fields if each.init and not _help(each)],
        "repeatable": cls() == built,
    }


def _help(field: Any) -> str:
    return "".join(getattr(about, "help", "") for about in field.metadata.values())


def _refuses_change(built: Any, fields: Any) -> bool:
    if not fields:
        return True
    name = fields[0].name
    try:
        setattr(built, name, getattr(built, name))
    except attrs.exceptions.FrozenInstanceError:
        return True
    return False


def _is_environment(answer: Any) -> bool:
    return isinstance(answer, Mapping) and all(isinstance(i, str) for pair in answer.items() for i in pair)


def _is_count(answer: Any) -> bool:
    return answer is None or (isinstance(answer, int) and not isinstance(answer, bool) and answer >= 0)


_BASELINE = {name.partition(".")[0] for name in sys.modules}

if __name__ == "__main__":
    sys.stdout.write(json.dumps(facts(*sys.argv[1:])) + "\n")

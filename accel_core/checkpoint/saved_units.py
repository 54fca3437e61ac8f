"""Units of a checkpoint, joined from all ranks, with tied weights named as here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_core.checkpoint.problems import Problems
    from accel_core.contract.unit import Unit
    from accel_core.storage.tensors import Checkpoint, Stored


def join_units(parts: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Units as several ranks have described them.

    Where two tell of one thing, the first is right: of a parameter's optimizers, the last in the list.
    """
    joined: dict[str, dict[str, Any]] = {}
    for part in reversed(parts):
        for name, unit in part.items():
            known = joined.setdefault(name, {"aliases": {}, "extra": {}, "optimizers": []})
            known["schedulers"] = unit["schedulers"]
            known["aliases"].update(unit["aliases"])
            known["extra"].update(unit["extra"])
            others = [other for other in known["optimizers"] if other not in unit["optimizers"]]
            known["optimizers"] = others + unit["optimizers"]
    return joined


def tensors_by_sort(unit: Unit, checkpoint: Checkpoint, problems: Problems) -> dict[str, dict[str, Stored]]:
    """Return the unit's stored tensors by sort, named as this run names tied weights."""
    tensors: dict[str, dict[str, Stored]] = {"model": {}, "optimizer": {}, "plugins": {}}
    first_keys: dict[tuple[str, str], str] = {}
    for (name, key), stored in checkpoint.tensors.items():
        if name != unit.name:
            continue
        sort, _, here = key.partition("/")
        if unit.aliases:
            owner, slash, part = here.rpartition("/") if sort == "optimizer" else (here, "", "")
            here = f"{unit.aliases.get(owner, owner)}{slash}{part}"
            if (first := first_keys.setdefault((sort, here), key)) != key:
                problems.fatal.append(f"{unit.name}: {first} and {key} are one here, by a tie, and were two")
        tensors[sort][here] = stored
    return tensors

"""Units of a checkpoint, joined from all ranks, with tied weights named as here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from accel_core.storage.codec import decode

if TYPE_CHECKING:
    from accel_core.checkpoint.problems import Problems
    from accel_core.contract.unit import Unit
    from accel_core.storage.tensors import Checkpoint, Stored


def join_units(parts: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Units as several ranks have described them.

    Where two tell of one thing, the first is right.
    """
    joined: dict[str, dict[str, Any]] = {}
    for part in reversed(parts):
        for name, unit in part.items():
            known = joined.setdefault(name, {"aliases": {}, "extra": {}, "optimizers": []})
            known["schedulers"] = unit["schedulers"]
            known["aliases"].update(unit["aliases"])
            known["extra"].update(unit["extra"])
            told = [_parameters_of(optimizer) for optimizer in unit["optimizers"]]
            others = [other for other in known["optimizers"] if _parameters_of(other) not in told]
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


def _parameters_of(optimizer: Mapping[str, Any]) -> set[str]:
    """Parameters of an optimizer that a rank has described.

    The same ones mean the same optimizer.
    """
    return {name for group in optimizer["groups"] for name in _names_in(group)}


def _names_in(group: Mapping[str, Any]) -> list[str]:
    if "params" not in group:  # keys of the user's own are no strings, so the group is stored in a tag
        group = decode(group, "groups", lambda _: torch.empty(0))
    names: list[str] = group["params"]
    return names

"""Units of a checkpoint, joined from all ranks, with tied weights named as here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from accel_core.checkpoint.codec import decode
from accel_core.distributed.tensor_bytes import bytes_of

if TYPE_CHECKING:
    from accel_core.checkpoint.problems import Problems
    from accel_core.checkpoint.read import Checkpoint, Stored
    from accel_core.contract.unit import Unit


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
            known, first = tensors[sort].get(here, stored), first_keys.setdefault((sort, here), key)
            if first != key and not _is_alike(known, stored):
                differ = f"{first} and {key} differ in the checkpoint, and are one here, by a tie"
                problems.found.append(f"{unit.name}: {differ}")
        tensors[sort].setdefault(here, stored)
    return tensors


def compare_state_of_tied(
    unit: Unit, checkpoint: Checkpoint, optimizers: Sequence[Mapping[str, Any]], problems: Problems
) -> None:
    """Note weights that are tied here, and of which optimizers kept different state."""
    # Name here -> name there -> what optimizers have of it.
    kept: dict[str, dict[str, set[str]]] = {}
    keys = [key.partition("/") for name, key in checkpoint.tensors if name == unit.name]
    for owner in [rest for sort, _, rest in keys if sort == "model"]:
        kept.setdefault(unit.aliases.get(owner, owner), {})[owner] = set()
    for owner, _, part in [rest.rpartition("/") for sort, _, rest in keys if sort == "optimizer"]:
        kept.get(unit.aliases.get(owner, owner), {}).setdefault(owner, set()).add(part)
    for optimizer in optimizers:
        for group in checkpoint.decode(optimizer["groups"], f"units.{unit.name} groups"):
            for name in group["params"]:
                kept.get(unit.aliases.get(name, name), {}).setdefault(name, set()).add("a group")
    for (first, had), *others in [[*names.items()] for names in kept.values() if names]:
        for name, has in others:
            if had != has:
                words = [", ".join(sorted(parts)) or "nothing" for parts in (had, has)]
                kinds = f"{first} has {words[0]}; {name} has {words[1]}"
                differ = f"differ in what their optimizer has of them ({kinds}), and are one here, by a tie"
                problems.found.append(f"{unit.name}: {first} and {name} {differ}")


def _is_alike(one: Stored, other: Stored) -> bool:
    """Compare contents."""
    return (one.shape, one.dtype, one.layout) == (other.shape, other.dtype, other.layout) and bytes_of(
        one.tensor()
    ) == bytes_of(other.tensor())


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

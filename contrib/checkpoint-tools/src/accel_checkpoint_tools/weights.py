"""Export a checkpoint's weights as whole files for other libraries."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

from accel_checkpoint_tools.found import nothing_written, of_program
from accel_core import (
    Checkpoint,
    CheckpointError,
    Stored,
    open_checkpoint,
    show_progress,
    storage_at,
    weights_in,
    weights_of_unit,
    write_weights,
)

__all__ = ["export"]

_Weights = tuple[list[tuple[list[str], Stored]], Mapping[str, Any]]
"""Weights with all of their names, and entries beside them, still encoded."""


def export(
    folder: str,
    target: str,
    *,
    unit: str | None,
    limit: int | str,
    safe: bool,
    force: bool = False,
    prefix: str | None = None,
) -> tuple[list[str], list[str]]:
    """Write the weights of a unit into `target`, or of each into a folder there.

    Returns the folders, and what is left out. Both folder and target may be URLs.

    A unit of several models gets a folder for each: `model0`, `model1`, ..., in the order of `prepare`.
    Everything is verified first. Needs memory for the weights of one file of `limit` bytes. `force`: files of
    weights that are there are replaced. `prefix`: of the keys of the tensors to write instead of models.

    Raises:
        CheckpointError: it is damaged, has no such unit, no weights, or weights that only their plugin can
            read; or there are weights in the target.
    """
    storage_at(target)  # a URL that nothing serves is refused before anything is read
    with open_checkpoint(storage_at(folder)) as files:
        checkpoint = Checkpoint.with_tensors(files)
        units = _homes(checkpoint, unit, target)
        parts = {name: _parts(checkpoint, name, prefix) for name in units}
        homes = {f"{units[name]}{inner}": part for name in units for inner, part in parts[name].items()}
        if not homes:
            raise _nothing(checkpoint, unit, prefix)
        with show_progress(f"verifying {files.place.name}", lambda: (files.meter.count, 0)):
            checkpoint.verify(checkpoint.blocks)
        for home in homes if not force else ():
            _refuse_there(home)
        for home, (weights, extra) in homes.items():
            whole = ((names, stored.tensor()) for names, stored in weights)
            values = {key: checkpoint.decode(value, f"{home}: {key}") for key, value in extra.items()}
            write_weights(home, whole, values, limit, safe=safe, replace=force)
        left = [f"unit {name}, which has no weights" for name, found in parts.items() if not found]
        return list(homes), left if prefix else [*left, *of_program(checkpoint.tensors)]


def _parts(checkpoint: Checkpoint, unit: str, prefix: str | None) -> dict[str, _Weights]:
    """Return the weights of each model, or those under the prefix, by what follows the unit's folder."""
    found: dict[str, _Weights] = {}
    if prefix is not None:
        if weights := [*_under(checkpoint, unit, f"{prefix.rstrip('/')}/")]:
            found[""] = weights, {}
        return found
    for number, start in _prefixes(checkpoint, unit):
        weights = [*weights_of_unit(checkpoint, unit, start)]
        entries = checkpoint.state["units"][unit]["extra"].items()
        extra = {key.removeprefix(start): value for key, value in entries if key.startswith(start)}
        if weights or extra:
            found[f"/model{number}" if start else ""] = weights, extra
    return found


def _under(checkpoint: Checkpoint, unit: str, start: str) -> Iterator[tuple[list[str], Stored]]:
    for (owner, key), stored in checkpoint.tensors.items():
        if owner == unit and key.startswith(start):
            if stored.layout is not None:
                raise CheckpointError(
                    f"{unit}: {key} is a part of a tensor that wraps others, of layout {stored.layout}\n"
                    "load it in a program that has such a tensor, and save it there",
                    path=str(checkpoint.place),
                )
            yield [key.removeprefix(start)], stored


def _nothing(checkpoint: Checkpoint, unit: str | None, prefix: str | None) -> CheckpointError:
    what = str(checkpoint.place) + (f": unit {unit}" if unit is not None else "")
    under = f"under {prefix!r:.200}" if prefix is not None else "of a model"
    keys = [key for key in checkpoint.tensors if unit in (None, key[0])]
    return nothing_written(what, f"weights {under}", keys, "write those of one with --prefix {prefix}")


def _homes(checkpoint: Checkpoint, unit: str | None, target: str) -> dict[str, str]:
    """Return the folder of each unit whose weights are exported."""
    units, path = checkpoint.state["units"], str(checkpoint.place)
    if unit is not None and unit not in units:
        raise CheckpointError(f"{path} has no unit {unit!r}\nit has {', '.join(units) or 'none'}", path=path)
    names = [*units] if unit is None else [unit]
    if len(names) == 1:
        return {names[0]: target}
    for name in names:
        if PurePath(name).name != name or name == "..":
            raise CheckpointError(
                f"unit {name!r} has no name that a folder can have, and each is to get one\n"
                f"export it alone: --unit {shlex.quote(name)}",
                path=path,
            )
    return {name: f"{target}/{name}" for name in names}


def _prefixes(checkpoint: Checkpoint, unit: str) -> list[tuple[int, str]]:
    """(place in the order of `prepare`, prefix of its names) of models with weights."""
    described = checkpoint.state["units"][unit]
    if described["models"] == 1:
        return [(0, "")]
    names = [key.removeprefix("model/") for owner, key in checkpoint.tensors if owner == unit]
    names += described["aliases"]
    numbers = [number for owner, number in checkpoint.state["prepared"]["models"] if owner == unit]
    prefixes = enumerate(f"{number}." for number in numbers)
    return [(order, prefix) for order, prefix in prefixes if any(n.startswith(prefix) for n in names)]


def _refuse_there(home: str) -> None:
    if there := weights_in(storage_at(home)):
        remedy = "remove it" if "://" in home else "replace it with --force"
        raise CheckpointError(
            f"{home}/{there[0]} exists, and was left as it is\nexport to another folder, or {remedy}",
            path=home,
        )

"""Export a checkpoint's weights as whole files for other libraries."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from accel_core.checkpoint.commit import locate
from accel_core.checkpoint.files import understanding
from accel_core.checkpoint.read import Checkpoint
from accel_core.checkpoint.stored import Place, place
from accel_core.checkpoint.weight_files import bytes_in, weights_in, write_weights
from accel_core.contract.arguments import did_you_mean
from accel_core.errors import CheckpointError

if TYPE_CHECKING:
    from accel_core.checkpoint.read import Stored


def export(
    folder: Place, target: Place, unit: str | None, limit: int | str, *, safe: bool, force: bool = False
) -> list[Place]:
    """Write the weights of a unit into `target`, or of each into a folder there.

    Returns the folders.

    A unit of several models gets a folder for each: `model0`, `model1`, ..., in the order of `prepare`.
    Everything is verified first. Needs memory for the weights of one file of `limit` bytes. `force`: files of
    weights that are there are replaced.

    Raises:
        CheckpointError: it is damaged, has no such unit, or weights that only their plugin can read; or
            there are weights in the target.
    """
    checkpoint = Checkpoint.open(locate(folder))
    checkpoint.verify(0, 1)
    with understanding(checkpoint.folder, calls_plugins=True):
        units = checkpoint.state["units"]
        if unit is not None and unit not in units:
            raise CheckpointError(
                f"{folder} has no unit {unit!r}{did_you_mean(unit, units)}"
                f"\nit has {', '.join(units) or 'none'}",
                path=str(folder),
            )
        names = [*units] if unit is None else [unit]
        chosen = {name: target if len(names) == 1 else target / name for name in names}
        for name in chosen if len(names) > 1 else ():
            if PurePath(name).name != name or name == "..":
                raise CheckpointError(
                    f"unit {name!r} has no name that a folder can have, and each is to get one\n"
                    f"export it alone: --unit {shlex.quote(name)}",
                    path=str(folder),
                )
        homes = {
            (name, prefix): home / f"model{number}" if prefix else home
            for name, home in chosen.items()
            for number, prefix in _prefixes(checkpoint, name)
        }
        if not force and (there := [path for home in homes.values() for path in weights_in(home)]):
            raise CheckpointError(
                f"{there[0]} exists, and was left as it is\nexport to another folder, or"
                f" {'replace it with --force' if isinstance(target, Path) else 'remove it'}",
                path=str(there[0]),
            )
        for (name, prefix), home in homes.items():
            extra = {
                key.removeprefix(prefix): checkpoint.decode(value, f"units.{name}.{key}")
                for key, value in units[name]["extra"].items()
                if key.startswith(prefix)
            }
            found = [*_stored(checkpoint, name, prefix)]
            total = sum(stored.nbytes for _, stored in found)
            whole = ((names, stored.tensor()) for names, stored in found)
            write_weights(home, whole, extra, bytes_in(limit), safe=safe, total=total, replace=force)
        return list(homes.values())


def stored_weights(folder: str | os.PathLike[str]) -> Iterator[tuple[list[str], Stored]]:
    """Yield (all names, stored weight) for each weight of a checkpoint's only model.

    No run is needed. Everything is verified first, and no weight is read. A stored weight has `shape`,
    `dtype` (torch's name without the prefix), `tensor()`, `read(target)`, and `place`: (file, start in
    bytes) if it lies in one piece.

    Raises:
        CheckpointError: the folder is not a checkpoint, is damaged, has several models, or a weight that only
            the plugin that saved it can read.
    """
    checkpoint = Checkpoint.open(locate(place(folder)))
    checkpoint.verify(0, 1)
    with understanding(checkpoint.folder):
        models = [(unit, told["models"]) for unit, told in checkpoint.state["units"].items()]
        if len(models) != 1 or models[0][1] != 1:
            raise CheckpointError(
                f"{folder} has {sum(number for _, number in models)} models, of units"
                f" {', '.join(name for name, _ in models)}; one was asked for\n"
                f"write them as files of their own: accel checkpoint export {folder} TARGET",
                path=str(folder),
            )
        yield from _stored(checkpoint, models[0][0])


def _stored(checkpoint: Checkpoint, unit: str, prefix: str = "") -> Iterator[tuple[list[str], Stored]]:
    told = checkpoint.state["units"][unit].get("names", {})
    for names, stored in _named(checkpoint, unit):
        keys = [key for each in names for key in told.get(each, [each]) if key.startswith(prefix)]
        if keys:
            if stored.layout is not None:
                only = "which only the plugin that saved it reads"
                raise CheckpointError(
                    f"{unit}: {names[0]} has layout {stored.layout}, {only}\n"
                    "load the checkpoint in a run with that plugin, and use save_model there",
                    path=str(checkpoint.folder),
                )
            yield [key.removeprefix(prefix) for key in keys], stored


def _prefixes(checkpoint: Checkpoint, unit: str) -> list[tuple[int, str]]:
    """(place in the order of `prepare`, prefix of its names) of models with weights."""
    if checkpoint.state["units"][unit]["models"] == 1:
        return [(0, "")]
    names = [name for listed, _ in _named(checkpoint, unit) for name in listed]
    numbers = [number for owner, number in checkpoint.state["prepared"]["models"] if owner == unit]
    prefixes = enumerate(f"{number}." for number in numbers)
    return [(order, prefix) for order, prefix in prefixes if any(n.startswith(prefix) for n in names)]


def _named(checkpoint: Checkpoint, unit: str) -> Iterator[tuple[list[str], Stored]]:
    """Each stored parameter and buffer of a unit, with all names that it has there."""
    names: dict[str, list[str]] = {}
    for alias, name in checkpoint.state["units"][unit]["aliases"].items():
        names.setdefault(name, [name]).append(alias)
    for (owner, key), stored in checkpoint.tensors.items():
        sort, _, name = key.partition("/")
        if (owner, sort) == (unit, "model"):
            yield names.get(name, [name]), stored

"""Export a checkpoint's weights as whole files for other libraries."""

from __future__ import annotations

import shlex
from pathlib import PurePath

from accel_core import (
    Checkpoint,
    CheckpointError,
    open_checkpoint,
    show_progress,
    storage_at,
    weights_in,
    weights_of_unit,
    write_weights,
)

__all__ = ["export"]


def export(
    folder: str, target: str, *, unit: str | None, limit: int | str, safe: bool, force: bool = False
) -> list[str]:
    """Write the weights of a unit into `target`, or of each into a folder there.

    Returns the folders. Both may be URLs.

    A unit of several models gets a folder for each: `model0`, `model1`, ..., in the order of `prepare`.
    Everything is verified first. Needs memory for the weights of one file of `limit` bytes. `force`: files of
    weights that are there are replaced.

    Raises:
        CheckpointError: it is damaged, has no such unit, or weights that only their plugin can read; or
            there are weights in the target.
    """
    storage_at(target)  # a URL that nothing serves is refused before anything is read
    with open_checkpoint(storage_at(folder)) as files:
        checkpoint = Checkpoint.with_tensors(files)
        with show_progress(f"verifying {files.place.name}", lambda: (files.meter.count, 0)):
            checkpoint.verify(checkpoint.blocks)
        homes = {
            (name, prefix): f"{home}/model{number}" if prefix else home
            for name, home in _homes(checkpoint, unit, target).items()
            for number, prefix in _prefixes(checkpoint, name)
        }
        for home in homes.values() if not force else ():
            _refuse_there(home)
        for (name, prefix), home in homes.items():
            extra = {
                key.removeprefix(prefix): checkpoint.decode(value, f"units.{name}.{key}")
                for key, value in checkpoint.state["units"][name]["extra"].items()
                if key.startswith(prefix)
            }
            found = [*weights_of_unit(checkpoint, name, prefix)]
            whole = ((names, stored.tensor()) for names, stored in found)
            write_weights(home, whole, extra, limit, safe=safe, replace=force)
        return list(homes.values())


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

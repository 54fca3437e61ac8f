"""The folders that Accelerate 1.x's `save_state` writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import Tensor

from accel_checkpoint_tools.contents import Contents, Source
from accel_checkpoint_tools.dcp import Folder, named, weights
from accel_checkpoint_tools.files import mapped, save_safetensors
from accel_checkpoint_tools.fitting import (
    optimizer_tensors,
    plugins_left_out,
    put_no_plugins,
    put_optimizer,
    put_weights,
    scalers,
    split,
)
from accel_checkpoint_tools.streams import from_foreign, to_foreign
from accel_checkpoint_tools.trusted import read_torch
from accel_core import CheckpointError

__all__ = ["read", "write"]

_SHARDED: Final = "pytorch_model_fsdp"
"""Accelerate's names of a sharded strategy's weights: a file, or a folder."""


def read(folder: Path, contents: Contents) -> list[str]:
    """Put what `folder` holds into the contents of a checkpoint of the same run.

    Gives what is left out.

    Raises:
        CheckpointError: a file is damaged, holds code, or does not fit the run.
    """
    used = _weights(folder, contents)
    for file, unit, number in _paired(folder, "optimizer", contents, "optimizers"):
        _optimizer(file, contents, unit, number)
        used.add(file)
    for file, unit, number in _paired(folder, "scheduler", contents, "schedulers"):
        contents.state["units"][unit]["schedulers"][number]["state"] = read_torch(file, str(file))
        used.add(file)
    used |= {*_registered(folder, contents), *_scaler(folder, contents), *_random(folder, contents)}
    rest = sorted(file for file in folder.iterdir() if file not in used)
    for file in rest:
        if file.is_dir():
            raise CheckpointError(
                f"{file} is a folder: a sharded strategy saved this\n"
                "where it has a file .metadata, import it with --format dcp",
                path=str(file),
            )
    left = [*map(str, rest), *put_no_plugins(contents, contents.state["units"])]
    if (folder / "random_states_1.pkl").exists() and (folder / "scheduler.bin").exists():
        left.append("that Accelerate steps schedulers once a process: they count that many times the steps")
    return left


def _series(folder: Path, stem: str, suffix: str) -> list[Path]:
    """STEM.SUFFIX, STEM_1.SUFFIX, ... as far as they are there."""
    found: list[Path] = []
    while (file := folder / f"{stem}{f'_{len(found)}' if found else ''}{suffix}").exists():
        found.append(file)
    return found


def _folders(folder: Path, stem: str) -> list[Path]:
    """STEM_0, STEM_1, ... as far as they are there: what sharded strategies save."""
    found: list[Path] = []
    while (child := folder / f"{stem}_{len(found)}").is_dir():
        found.append(child)
    return found


def _weights(folder: Path, contents: Contents) -> set[Path]:
    files = _model_files(folder)
    # Accelerate numbers files by the order of `prepare`, over all units.
    places = _places(contents, "models")
    _same_number(folder, "models", files, places)
    for unit, described in contents.state["units"].items():
        mine = {number: file for file, (name, number) in zip(files, places, strict=True) if name == unit}
        tensors = {
            f"{number}.{name}" if described.get("models", 1) > 1 else name: tensor
            for number, file in mine.items()
            for name, tensor in _load(file).items()
        }
        put_weights(contents, unit, tensors, ", ".join(map(str, mine.values())))
    return set(files)


def _model_files(folder: Path) -> list[Path]:
    files = (
        _series(folder, "model", ".safetensors")
        or _series(folder, "pytorch_model", ".bin")
        or _series(folder, _SHARDED, ".bin")
        or _folders(folder, _SHARDED)
    )
    if not files and (parts := sorted(folder.glob(f"{_SHARDED}*_rank*.bin"))):
        raise CheckpointError(
            f"{folder} has the part of each rank in a file of its own ({parts[0].name}), which only FSDP"
            " wrapped as it was then can put together\n"
            "load it with Accelerate, and save it there with fsdp_state_dict_type FULL_STATE_DICT",
            path=str(folder),
        )
    if not files:
        raise CheckpointError(
            f"{folder} has neither model.safetensors nor pytorch_model.bin, {_SHARDED}.bin or {_SHARDED}_0\n"
            "give a folder that Accelerate's save_state wrote",
            path=str(folder),
        )
    return files


def _places(contents: Contents, sort: str) -> list[tuple[str, int]]:
    """Return (unit, number there) of each such object, in `prepare`'s order.

    Accelerate numbers so.
    """
    return [(unit, number) for unit, number in contents.state["prepared"][sort]]


def _load(file: Path) -> Mapping[str, Source]:
    if file.is_dir():
        return weights(Folder.open(file), "model")
    if file.suffix == ".bin":
        return _sources(read_torch(file, str(file)))
    try:
        opened: Any = safe_open(file, framework="pt")
        return _sources({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118  not a dict
    except Exception as error:  # the library's own exception class is not a public name
        raise CheckpointError(f"{file} is damaged: {error}\nrestore this file", path=str(file)) from error


def _sources(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values, each tensor as its source. Tensors of files are mapped."""
    return {name: Source.of(each) if isinstance(each, Tensor) else each for name, each in values.items()}


def _paired(folder: Path, stem: str, contents: Contents, sort: str) -> Iterator[tuple[Path, str, int]]:
    """(file, unit, number there) of each file of a series."""
    places = _places(contents, sort)
    files = _series(folder, stem, ".bin") or _folders(folder, stem)
    _same_number(folder, sort, files, places)
    return ((file, *place) for file, place in zip(files, places, strict=True))


def _same_number(folder: Path, what: str, there: Any, here: Any) -> None:
    if len(there) != len(here):
        raise CheckpointError(
            f"{folder} has {len(there)} {what}, this run {len(here)}\n"
            "prepare and register what was there when it was saved, in the same order",
            path=str(folder),
        )


def _optimizer(file: Path, contents: Contents, unit: str, number: int) -> None:
    described = contents.state["units"][unit]["optimizers"][number]
    if file.is_dir():
        put_optimizer(contents, unit, number, *named(Folder.open(file), "optimizer", described), str(file))
        return
    saved, here = read_torch(file, str(file)), [group["params"] for group in described["groups"]]
    try:
        there = [group["params"] for group in saved["param_groups"]]
        if all(type(name) is str for listed in there for name in listed):  # a sharded strategy's
            here = there
        if [*map(len, there)] != [*map(len, here)]:
            raise CheckpointError(
                f"{file}: its groups have {[*map(len, there)]} parameters, here {[*map(len, here)]}\n"
                "make the optimizer's groups as they were when it was saved",
                path=str(file),
            )
        # Else the file numbers parameters, and names none: the order is the run's.
        names = dict(zip(chain(*there), chain(*here), strict=True))
        groups = [
            (mine, {key: value for key, value in group.items() if key not in ("params", "param_names")})
            for group, mine in zip(saved["param_groups"], here, strict=True)
        ]
        state = {names[number]: _sources(values) for number, values in saved["state"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{file} is not an optimizer's state: {error!r}\nrestore this file", path=str(file)
        ) from error
    put_optimizer(contents, unit, number, groups, state, str(file))


def _registered(folder: Path, contents: Contents) -> list[Path]:
    files = [folder / f"custom_checkpoint_{number}.pkl" for number in range(1000)]
    files = [file for file in files if file.exists()]
    _same_number(folder, "registered objects", files, contents.state["registered"])
    for file, item in zip(files, contents.state["registered"], strict=True):
        item["state"] = read_torch(file, str(file))
    return files


def _scaler(folder: Path, contents: Contents) -> list[Path]:
    file, found = folder / "scaler.pt", scalers(contents)
    if not (file.exists() and found):
        return []
    for entries in found:
        entries["scaler"] = read_torch(file, str(file))
    return [file]


def _random(folder: Path, contents: Contents) -> list[Path]:
    """Random streams of each rank, if there are as many as there were."""
    files = [folder / f"random_states_{rank}.pkl" for rank in range(len(contents.ranks))]
    more = folder / f"random_states_{len(files)}.pkl"
    if more.exists() or not all(file.exists() for file in files):
        return []
    for rank, (file, own) in enumerate(zip(files, contents.ranks, strict=True)):
        states = read_torch(file, str(file))
        own["random"] = from_foreign(states, own["random"], rank)
        contents.members["step"] = states.get("step", contents.members["step"])
    return files


# -- export --------------------------------------------------------------------------------------


def write(contents: Contents, folder: Path) -> list[str]:
    """Write what Accelerate's `load_state` reads into the empty `folder`.

    Gives what is left out.
    """
    units = contents.state["units"]
    weights = {unit: split(contents, unit) for unit in units}
    for place, (unit, number) in enumerate(_places(contents, "models")):
        save_safetensors(weights[unit][number], folder / f"{_name('model', place)}.safetensors")
    for place, (unit, number) in enumerate(_places(contents, "optimizers")):
        optimizer = _numbered(contents, unit, units[unit]["optimizers"][number])
        with mapped(optimizer, folder) as state:
            torch.save(state, folder / f"{_name('optimizer', place)}.bin")
    for place, (unit, number) in enumerate(_places(contents, "schedulers")):
        scheduler = units[unit]["schedulers"][number]["state"]
        torch.save(scheduler, folder / f"{_name('scheduler', place)}.bin")
    for number, item in enumerate(contents.state["registered"]):
        torch.save(item["state"], folder / f"custom_checkpoint_{number}.pkl")
    for entries in scalers(contents)[:1]:
        torch.save(entries["scaler"], folder / "scaler.pt")
    left = ["the position of dataloaders"] if any(own["loaders"] for own in contents.ranks) else []
    left += [] if contents.ranks[0]["random"] else ["random streams: the checkpoint has none"]
    for rank, own in enumerate(contents.ranks if contents.ranks[0]["random"] else []):
        states = {"step": contents.members["step"] or 0, **to_foreign(own["random"], rank)}
        torch.save(states, folder / f"random_states_{rank}.pkl")
    return [*left, *plugins_left_out(contents, units)]


def _name(stem: str, number: int) -> str:
    return f"{stem}_{number}" if number else stem


def _numbered(contents: Contents, unit: str, optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state in the form of torch's `state_dict`."""
    names = [name for group in optimizer["groups"] for name in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    state: dict[int, Any] = {numbers[name]: dict(values) for name, values in optimizer["plain"].items()}
    for name, key, source in optimizer_tensors(contents, unit):
        if name in numbers:
            state.setdefault(numbers[name], {})[key] = source
    groups = [
        {**group, "params": [numbers[name] for name in group["params"]]} for group in optimizer["groups"]
    ]
    return {"state": state, "param_groups": groups}

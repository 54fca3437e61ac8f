"""Reads folders of `torch.distributed.checkpoint`, without running its code."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from accel_checkpoint_tools.contents import Contents, Source
from accel_checkpoint_tools.files import mapped
from accel_checkpoint_tools.fitting import (
    HOW,
    Group,
    names_of,
    optimizer_tensors,
    plugins_left_out,
    put_no_optimizer,
    put_no_plugins,
    put_optimizer,
    put_weights,
    scalers,
)
from accel_checkpoint_tools.trusted import read_metadata, read_torch
from accel_core import Box, CheckpointError, Outline, tiling_problem

__all__ = ["Folder", "named", "read", "weights", "write"]


@frozen
class Folder:
    """Such a folder.

    What is stored under which path of the nested state that was saved.
    """

    path: Path
    items: Mapping[str, Any]
    """Flat name -> description."""
    paths: Mapping[str, tuple[str | int, ...]]
    """Flat name -> its place in the nested state."""
    chunks: Mapping[str, list[tuple[tuple[int, ...], Any]]]
    """Flat name -> (offset of a part, where it is stored)."""

    @classmethod
    def open(cls, path: Path) -> Folder:
        """Raise CheckpointError if it is not one, is damaged, or names code."""
        metadata = read_metadata(path / ".metadata")
        try:
            chunks: dict[str, list[tuple[tuple[int, ...], Any]]] = {}
            for index, place in metadata.storage_data.items():
                chunks.setdefault(index.fqn, []).append((tuple(getattr(index, "offset", None) or ()), place))
            paths = {name: tuple(found) for name, found in metadata.planner_data.items()}
            return cls(path, metadata.state_dict_metadata, paths, chunks)
        except (AttributeError, TypeError) as error:
            raise _odd(path / ".metadata", repr(error)) from error

    @property
    def tops(self) -> list[str]:
        """The keys of what was saved."""
        return sorted({str(path[0]) for path in self.paths.values()})

    def nested(self, *start: str) -> dict[str | int, Any]:
        """All that lies under `start`, nested as it was saved; lists are dicts by number."""
        found: dict[str | int, Any] = {}
        for name, path in self.paths.items():
            if path[: len(start)] == start and len(path) > len(start):
                place = found
                for part in path[len(start) : -1]:
                    place = place.setdefault(part, {})
                place[path[-1]] = self.load(name)
        return found

    def load(self, name: str) -> Any:
        """Return one item: plain data, or the source of a tensor, which is put together from its parts."""
        try:
            described, chunks = self.items[name], self.chunks[name]
            if type(described).__name__ == "BytesStorageMetadata":
                ((_, place),) = chunks
                self._require_inside(place)
                return read_torch(io.BytesIO(self._bytes(place)), f"{self.path}: {name}")
            return self._source(name, described, dict(chunks))
        except (KeyError, AttributeError, TypeError, ValueError) as error:
            raise _odd(self.path / ".metadata", f"{name}: {error!r}") from error

    def _source(self, name: str, described: Any, places: Mapping[tuple[int, ...], Any]) -> Source:
        """Return the source of a tensor whose parts make it up, and are in the files of this folder."""
        dtype, shape = described.properties.arguments[0], tuple(described.size)
        boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in described.chunks]
        if problem := tiling_problem(shape, boxes):
            raise ValueError(problem)
        for box in boxes:
            if places[box.offset].length < box.volume * dtype.itemsize:
                raise ValueError(f"{box.volume} elements cannot be in {places[box.offset].length} bytes")
            self._require_inside(places[box.offset])
        outline = Outline("like_param", shape, str(dtype).removeprefix("torch."))
        parts = [(box, places[box.offset]) for box in boxes]
        return Source(outline, partial(self._tensor, name, dtype, shape, parts))

    def _tensor(self, name: str, dtype: Any, shape: tuple[int, ...], parts: list[tuple[Box, Any]]) -> Tensor:
        whole = torch.empty(shape, dtype=dtype)
        for box, place in parts:
            part = read_torch(io.BytesIO(self._bytes(place)), f"{self.path}: {name}")
            if not isinstance(part, Tensor) or (tuple(part.shape), part.dtype) != (box.shape, dtype):
                problem = f"{name}: the part at {list(box.offset)} is not {dtype} of shape {list(box.shape)}"
                raise _odd(self.path / ".metadata", problem)
            whole[tuple(map(slice, box.offset, box.ends))] = part
        return whole

    def _require_inside(self, place: Any) -> None:
        """Raise ValueError unless these bytes are in a file of this folder."""
        name = str(place.relative_path)
        if Path(name).name != name:
            raise ValueError(f"{name!r} is no file in this folder")
        if getattr(place, "transform_descriptors", None):
            raise ValueError(f"it is stored as {place.transform_descriptors}, which is not read here")
        file, start, size = self.path / name, place.offset, place.length
        if file.is_symlink() or not 0 <= start <= start + size <= file.stat().st_size:
            raise ValueError(f"{size} bytes at {start} are not in {name}")

    def _bytes(self, place: Any) -> bytes:
        with (self.path / str(place.relative_path)).open("rb") as opened:
            opened.seek(place.offset)
            return opened.read(place.length)


def _odd(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(
        f"{path} does not describe what is there: {problem}\n"
        "it is damaged, or of a version of torch that is not known here",
        path=str(path),
    )


def read(
    folder: Path, contents: Contents, unit: str, model: str = "model", optimizer: str = "optimizer"
) -> list[str]:
    """Put what `folder` holds into a unit of a checkpoint of the same run.

    Gives what is left out.

    model, optimizer: the keys under which they were saved; optimizers as
    `torch.distributed.checkpoint.state_dict` gives them, by parameter name.

    Raises:
        CheckpointError: it is damaged, names code, or does not fit the run.
    """
    opened = Folder.open(folder)
    put_weights(contents, unit, weights(opened, model), f"{folder}: {model}")
    anew = put_no_plugins(contents, [unit])
    described, tops = contents.state["units"][unit]["optimizers"], opened.tops
    if optimizer not in tops or len(described) != 1:
        left = [*(top for top in tops if top != model), *anew]
        if described:
            put_no_optimizer(contents, unit)
            number = f"this run has {len(described)}" if optimizer in tops else f"{folder} has none"
            left.append(f"the optimizer's state: {number}, and it begins anew")
        return left
    put_optimizer(contents, unit, 0, *named(opened, optimizer, described[0]), f"{folder}: {optimizer}")
    return [*(top for top in tops if top not in (model, optimizer)), *anew]


def weights(opened: Folder, model: str) -> dict[str, Source]:
    """Return the weights that were saved under the key `model`, by name."""
    if model not in opened.tops:
        raise CheckpointError(
            f"{opened.path} has no {model!r}; it has {', '.join(opened.tops)}\n"
            "say which one is the model with --model",
            path=str(opened.path),
        )
    names = {name: path[1:] for name, path in opened.paths.items() if path[0] == model}
    return {".".join(map(str, path)): opened.load(name) for name, path in names.items()}


def named(
    opened: Folder, optimizer: str, described: Mapping[str, Any]
) -> tuple[list[Group], dict[str, dict[str, Any]]]:
    """Return (groups, state by name) of what was saved under the key `optimizer`."""
    return _optimizer(opened.nested(optimizer), described, opened.path)


def _optimizer(
    saved: Mapping[Any, Any], described: Mapping[str, Any], folder: Path
) -> tuple[list[Group], dict[str, dict[str, Any]]]:
    """Return (groups, state by name) of a `get_optimizer_state_dict`."""
    if "param_groups" in saved:
        found = [dict(saved["param_groups"][number]) for number in sorted(saved["param_groups"])]
        return [(_names(group.pop("params")), group) for group in found], saved.get("state", {})
    groups: list[Group] = []
    state: dict[str, dict[str, Any]] = {}
    for group in described["groups"]:
        groups.append((group["params"], _under(saved, f"param_groups.{group['params'][0]}.")))
        state |= {name: _under(saved, f"state.{name}.") for name in group["params"]}
    if not any(hyper for _, hyper in groups):
        raise CheckpointError(
            f"{folder}: its optimizer has no parameter groups by name\n"
            "save it as torch.distributed.checkpoint.state_dict.get_optimizer_state_dict gives it",
            path=str(folder),
        )
    return groups, state


def _under(saved: Mapping[Any, Any], prefix: str) -> dict[str, Any]:
    return {key.removeprefix(prefix): value for key, value in saved.items() if str(key).startswith(prefix)}


def _names(params: Any) -> list[str]:
    return [params[number] for number in sorted(params)] if isinstance(params, dict) else list(params)


# -- export --------------------------------------------------------------------------------------


def write(
    contents: Contents, folder: Path, unit: str, model: str = "model", optimizer: str = "optimizer"
) -> list[str]:
    """Write a unit's weights and optimizer as torch itself does, by name.

    Gives what is left out.
    """
    from torch.distributed.checkpoint.state_dict_saver import save

    described = contents.state["units"][unit]
    weights = {name: contents.tensors[unit, f"model/{name}"] for name in names_of(contents, unit)}
    weights |= {alias: weights[name] for alias, name in described["aliases"].items()}
    state: dict[str, Any] = {model: weights}
    left = ["schedulers, random streams, registered objects and the position of dataloaders"]
    left += [*plugins_left_out(contents, [unit]), *(["the loss scale"] if scalers(contents) else [])]
    if len(described["optimizers"]) == 1:
        state[optimizer] = _optimizer_state(contents, unit)
    elif described["optimizers"]:
        left.append(f"the {len(described['optimizers'])} optimizers of the unit")
    with mapped(state, folder) as tensors, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nothing is distributed here
        save(tensors, checkpoint_id=folder, no_dist=True)
    return left


def _optimizer_state(contents: Contents, unit: str) -> dict[str, Any]:
    (saved,) = contents.state["units"][unit]["optimizers"]
    values: dict[str, dict[str, Any]] = {name: dict(plain) for name, plain in saved["plain"].items()}
    for name, key, source in optimizer_tensors(contents, unit):
        values.setdefault(name, {})[key] = source
    # Torch loads the keys that a program asks for, and fails for one that is not there.
    return {"state": values, "param_groups": [{**HOW, **group} for group in saved["groups"]]}

"""Functions of `torch.distributed.checkpoint` on this storage: `save`, `load`, `async_save`; and `verify`.

The functions take the first arguments of torch's functions of the same names
(https://docs.pytorch.org/docs/stable/distributed.checkpoint.html), and need no Accelerator.

    from accel_core.storage import load, save

    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer), "step": 7}
    save(state, checkpoint_id="checkpoints/7")
    load(state, checkpoint_id="checkpoints/7")

A state is nested mappings, lists and tuples of tensors, DTensors and plain data. Tensors at its top level,
and in its entry "model", are stored as the weights of a model, which `accel checkpoint export` writes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from secrets import token_hex
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from accel_core.errors import CheckpointError
from accel_core.storage.commit import manifests, not_a_checkpoint
from accel_core.storage.disk import Disk
from accel_core.storage.group import GroupComm
from accel_core.storage.leaves import Leaf, leaf_of, parts_of, wraps
from accel_core.storage.loading import load_planned
from accel_core.storage.opened import Block, open_checkpoint
from accel_core.storage.ranks import Alone, first_here
from accel_core.storage.saver import Saver
from accel_core.storage.series import Numbering, Series
from accel_core.storage.state import State
from accel_core.storage.tensors import Checkpoint, Stored, fill

if TYPE_CHECKING:
    from accel_core.storage.pending import Pending
    from accel_core.storage.protocols import Comm, Storage

__all__ = ["async_save", "load", "save", "verify"]

logger = logging.getLogger(__name__)

UNIT: Final = "main"
_MODEL: Final = "model"
_TORCHS: Final = frozenset(
    {
        "async_checkpointer_type",
        "async_stager",
        "planner",
        "storage_reader",
        "storage_writer",
        "use_collectives",
    }
)
"""Arguments of torch's functions that must be None here."""
_savers: WeakKeyDictionary[Any, Saver] = WeakKeyDictionary()
"""Process group, or `_ALONE` -> saver, which reuses the layout and buffers of the save before."""
_ALONE: Final = Alone()
_background: Final = ThreadPoolExecutor(1, thread_name_prefix="async_save")


def save(
    state_dict: Mapping[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | Storage,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    **others: None,
) -> None:
    """Save a state as the checkpoint `checkpoint_id`. Collective over the process group.

    An earlier checkpoint in the folder stays until the new checkpoint is complete; a kill at any instant
    leaves one of the two, whole. If several ranks hold a part of a tensor, one rank writes it. Values that
    are not tensors are taken from rank 0; values in which another rank differs are saved for that rank too.

    Args:
        state_dict: nested mappings, lists and tuples of tensors, DTensors and plain data; entries at the top
            may be objects with `state_dict` and `load_state_dict`.
        checkpoint_id: a folder that all ranks see, or a `Storage`.
        process_group: default: the default group; if none is initialized, this process saves alone.
        no_dist: save alone, even if there is a process group.
        others: arguments of torch's function, which must be None.

    Raises:
        CheckpointError: a value cannot be stored, the folder has other files, or a rank failed to write.
            Raised on all ranks; an earlier checkpoint in the folder is unchanged.
        TypeError: an argument that is not served is not None.
    """
    _refuse(others)
    _saved(state_dict, checkpoint_id, process_group, no_dist=no_dist, wait=True).wait()


def async_save(
    state_dict: Mapping[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | Storage,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    **others: None,
) -> Future[None]:
    """Copy a state and write it in a thread; otherwise like `save`. Collective over the process group.

    The next save waits for this save, and the process does not end before the save has ended.

    Returns:
        A future that is done once the checkpoint is complete, or that has the error.
    """
    _refuse(others)
    pending = _saved(state_dict, checkpoint_id, process_group, no_dist=no_dist, wait=False)
    return _background.submit(_finish, pending)


def load(
    state_dict: MutableMapping[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | Storage,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    **others: None,
) -> None:
    """Load the checkpoint `checkpoint_id` into a state, in place. Collective over the process group.

    The checkpoint may have been saved by any number of ranks, with tensors sharded in any way. Tensors are
    filled; values that are not tensors are replaced in their mappings and lists. Entries of the checkpoint
    that the state lacks are not read. Every byte is verified before anything is changed.

    Args:
        state_dict: as in `save`, with tensors of the saved shapes.
        checkpoint_id: as in `save`.
        process_group: as in `save`.
        no_dist: as in `save`.
        others: as in `save`.

    Raises:
        CheckpointError: the folder is not a checkpoint, a file is damaged, or the state has entries or shapes
            that the checkpoint lacks. Raised on all ranks, before anything is changed.
        TypeError: an argument that is not served is not None.
    """
    _refuse(others)
    (_, comm), place = _comm(process_group, no_dist=no_dist), _place(checkpoint_id)

    def look() -> tuple[str, str | None]:
        found = manifests(place) if first_here(comm, place) else []
        if first_here(comm, place) and not found:
            raise not_a_checkpoint(place)
        return token_hex(8), found[0].save_id if found else None

    nonce, save_id = comm.together("load: look", look)[0]
    load_planned(comm, place, save_id, nonce, lambda checkpoint: _Filling(state_dict, checkpoint, comm))


def verify(checkpoint_id: str | os.PathLike[str] | Storage) -> None:
    """Read every byte of a checkpoint, and compare it with its hashes. Not collective.

    Raises:
        DamagedError: a file is missing or was changed; the message names the file.
        CheckpointError: the folder is not a checkpoint, or cannot be read now.
    """
    with open_checkpoint(_place(checkpoint_id)) as opened:
        opened.verify(opened.blocks)


# -- saving ----------------------------------------------------------------------------------------------


def _saved(
    state_dict: Mapping[str, Any], checkpoint_id: Any, group: Any, *, no_dist: bool, wait: bool
) -> Pending:
    key, comm = _comm(group, no_dist=no_dist)
    place, saver = _place(checkpoint_id), _savers.setdefault(key, Saver(comm))

    def finish_earlier() -> None:
        with suppress(CheckpointError):  # the future of that save has the error
            saver.wait()

    return saver.save(
        lambda: _state_of(state_dict, comm),
        Series(lambda: Numbering(place, "storage")),
        place,
        wait=wait,
        wait_for_previous_save=finish_earlier,
    )


def _finish(pending: Pending) -> None:
    try:
        pending.wait()
    except CheckpointError:
        logger.exception("async_save failed")  # in case the program never reads the future
        raise


def _state_of(state_dict: Mapping[str, Any], comm: Comm) -> State:
    """Return the state that this rank saves: its leaves, and its values that are not tensors."""
    state = State()
    values: dict[str, Any] = {}
    for path, value, _ in _entries(state_dict, _states_of_objects(state_dict)):
        if isinstance(value, Tensor):
            for key, leaf in _leaves(path, value):
                state.add((UNIT, key), leaf)
        else:
            name = "/".join(path)
            if name in values:
                raise CheckpointError(
                    f"two values of the state have the key {name!r}\n"
                    "keys are joined by '/', and numbers become text: rename one of them"
                )
            values[name] = state.encode(value, name)
    has_weights = any(key.startswith(f"{_MODEL}/") for _, key in state.leaves)
    unit = {"strategy": "none", "models": int(has_weights), "aliases": {}, "extra": {}}
    state.shared = {
        "units": {UNIT: {**unit, "optimizers": [], "schedulers": []}},
        "prepared": {"models": [[UNIT, 0]] * has_weights, "optimizers": [], "schedulers": []},
        "registered": [],
        "values": values,
    }
    state.own = {"reader": 0, "random": {}, "loaders": [], "plugins": {}}
    state.summary_for_ranks, state.merge_summaries = values, _keep_own_values
    state.members = partial(_members, comm, state_dict.get("step"))
    return state


def _keep_own_values(state: State, values: Sequence[Any], rank: int) -> None:
    """Save the values in which this rank differs from rank 0 as its own."""
    own = {path: value for path, value in values[rank].items() if values[0].get(path, _ABSENT) != value}
    if own:
        state.own["values"] = own


_ABSENT: Final = object()


def _members(comm: Comm, step: Any) -> dict[str, Any]:
    """Return the members of the manifest that describe the program."""
    from accel_core._version import __version__

    exact_at = {"size": len(comm.nodes), "readers": 1}
    return {
        "run_id": "storage",
        "lineage": ["storage"],
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "step": step if type(step) is int else None,
        "world": {**exact_at, "nodes": len({*comm.nodes})},
        "mesh": {},
        "stack": {"summary": "torch.distributed", "plugins": {}, "units": {UNIT: "none"}, "device": ""},
        "config": {},
        "random": {"exact_at": exact_at, "elsewhere": "derived"},
        "versions": {"accel-core": __version__, "torch": torch.__version__},
    }


# -- loading ---------------------------------------------------------------------------------------------


class _Filling:
    """The plan of a load: the tensors to fill and the values to replace."""

    def __init__(self, state_dict: MutableMapping[str, Any], checkpoint: Checkpoint, comm: Comm) -> None:
        self._pairs: list[tuple[Stored, Leaf]] = []
        self._replaced: list[tuple[Callable[[Any], object], Any]] = []
        self._checkpoint, self._problems = checkpoint, list[str]()
        self._values = _values_for(comm.rank, checkpoint)
        states = _states_of_objects(state_dict)
        self._objects = [(state_dict[key], state) for key, state in states.items()]
        for path, value, replace in _entries(state_dict, states):
            self._plan(path, value, replace)
        if self._problems:
            listed = "\n".join(self._problems[:10])
            more = len(self._problems) - 10
            raise CheckpointError(
                f"{checkpoint.place} does not fit the state:\n{listed}"
                + (f"\nand {more} more" if more > 0 else "")
                + "\nload into a state with the entries and shapes that were saved",
                path=str(checkpoint.place),
            )

    def _plan(self, path: tuple[str, ...], value: Any, replace: Callable[[Any], object] | None) -> None:
        name = "/".join(path)
        if isinstance(value, Tensor):
            for key, leaf in _leaves(path, value):
                self._plan_tensor(name, key, leaf)
        elif name not in self._values:
            self._problems.append(f"{name}: the checkpoint has no such value")
        elif replace is not None:
            self._replaced.append((replace, self._checkpoint.decode(self._values[name], name)))

    def _plan_tensor(self, name: str, key: str, leaf: Leaf) -> None:
        stored = self._checkpoint.tensors.get((UNIT, key))
        if stored is None:
            self._problems.append(f"{name}: the checkpoint has no such tensor")
        elif (stored.shape, stored.layout) != (leaf.global_shape, leaf.layout):
            was = f"{list(stored.shape)} {stored.layout or ''}".strip()
            now = f"{list(leaf.global_shape)} {leaf.layout or ''}".strip()
            self._problems.append(f"{name}: {was} was saved, and the state has {now}")
        else:
            self._pairs.append((stored, leaf))

    def blocks(self) -> set[Block]:
        return self._checkpoint.blocks_of(self._pairs)

    def apply(self) -> None:
        with torch.no_grad():
            fill(self._pairs)
        for replace, value in self._replaced:
            replace(value)
        for thing, state in self._objects:
            thing.load_state_dict(state)


def _values_for(rank: int, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return path -> encoded value: this rank's own if saved, else rank 0's, else another rank's."""
    own = {number: each.get("values", {}) for number, each in checkpoint.ranks.items()}
    found: dict[str, Any] = {}
    for values in (*own.values(), checkpoint.state["values"], own.get(rank, {})):
        found |= values
    return found


# -- states ----------------------------------------------------------------------------------------------


def _entries(
    value: Any, replaced: Mapping[Any, Any] = MappingProxyType({}), path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any, Callable[[Any], object] | None]]:
    """Yield (path, value, function that replaces the value) of each tensor and plain value of a state.

    A list or tuple without tensors and mappings is one value. `replaced` maps keys to values that are used
    instead of the state's entries.
    """
    for key, entry in value.items() if isinstance(value, Mapping) else enumerate(value):
        each, inner = replaced.get(key, entry), (*path, str(key))
        if isinstance(each, Mapping) or (isinstance(each, (list, tuple)) and _has_parts(each)):
            yield from _entries(each, path=inner)
        else:
            yield inner, each, _setter(value, key)


def _setter(container: Any, key: Any) -> Callable[[Any], object] | None:
    if isinstance(container, (MutableMapping, list)):
        return partial(container.__setitem__, key)
    return None


def _has_parts(value: Sequence[Any]) -> bool:
    return any(
        isinstance(each, (Tensor, Mapping)) or (isinstance(each, (list, tuple)) and _has_parts(each))
        for each in value
    )


def _states_of_objects(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return key -> `state_dict()` of the objects at the top of a state."""
    return {
        key: each.state_dict()
        for key, each in state_dict.items()
        if callable(getattr(each, "state_dict", None)) and callable(getattr(each, "load_state_dict", None))
    }


def _leaves(path: tuple[str, ...], tensor: Tensor) -> Iterator[tuple[str, Leaf]]:
    """Yield (key, leaf) of a tensor, or of each part if the tensor wraps others."""
    is_weight = path[0] == _MODEL or len(path) == 1
    key = "/".join((_MODEL, *path[path[0] == _MODEL :]) if is_weight else ("values", *path))
    if wraps(tensor):
        for name, part, layout in parts_of(tensor):
            yield f"{key}#{name}", leaf_of(part, kind="opaque", layout=layout)
    else:
        yield key, leaf_of(tensor, kind="scalar" if tensor.ndim == 0 else "like_param")


# -- arguments -------------------------------------------------------------------------------------------


def _refuse(others: Mapping[str, Any]) -> None:
    for name, value in others.items():
        if name not in _TORCHS:
            raise TypeError(f"there is no argument {name!r}")
        if value is not None:
            raise TypeError(f"{name} is torch.distributed.checkpoint's, and not served here; leave it out")


def _comm(group: dist.ProcessGroup | None, *, no_dist: bool) -> tuple[Any, Comm]:
    """Return the process group and its ranks; `_ALONE` for both without a process group."""
    if no_dist or not (dist.is_available() and dist.is_initialized()):
        return _ALONE, _ALONE
    group = group or dist.group.WORLD
    assert group is not None
    return group, GroupComm.of(group)


def _place(checkpoint_id: Any) -> Storage:
    if not isinstance(checkpoint_id, (str, os.PathLike)):
        if hasattr(checkpoint_id, "claim"):
            place: Storage = checkpoint_id
            return place
        raise CheckpointError(
            f"checkpoint_id must be a path or a Storage, got {checkpoint_id!r:.200}\n"
            "give the name of a folder"
        )
    text = os.fspath(checkpoint_id)
    if "://" in text:
        raise CheckpointError(
            f"{text} is a URL\ngive a path or a Storage; Accelerator.save_state takes URLs", path=text
        )
    return Disk(Path(os.path.realpath(Path(text).expanduser())))

"""Write a checkpoint from tensors that are read one by one, in a single process. For converters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from accel_core.errors import CheckpointError
from accel_core.storage.commit import begin, cannot_be_saved, new_save_id
from accel_core.storage.files import as_json
from accel_core.storage.layout import Layout
from accel_core.storage.leaves import Key, Kind, declare, full_leaf
from accel_core.storage.pending import Pending, Share
from accel_core.storage.ranks import Alone
from accel_core.storage.state import State
from accel_core.storage.tensor_bytes import DTYPES, bytes_of

if TYPE_CHECKING:
    from accel_core.storage.protocols import Storage


class Outline(NamedTuple):
    """The description of a tensor. `dtype` is torch's name without the prefix."""

    kind: Kind
    shape: tuple[int, ...]
    dtype: str
    layout: str | None = None


def write_checkpoint(
    place: Storage,
    members: Mapping[str, Any],
    shared: Mapping[str, Any],
    ranks: Sequence[Mapping[str, Any]],
    outlines: Mapping[Key, Outline],
    read: Callable[[Key], Tensor],
) -> None:
    """Write the checkpoint `place`, as atomically as a run does.

    Only one tensor at a time is in memory, beside `shared` and `ranks`.

    Args:
        place: the checkpoint's folder.
        members: members of the manifest, without the members of the save itself.
        shared: members of `state.json`, not encoded yet.
        ranks: the `state` of each rank, not encoded yet.
        outlines: key -> description of each tensor.
        read: returns the whole tensor of a key; called once per key.

    Raises:
        CheckpointError: a value is not plain data, or the place cannot be written.
    """
    shares = [
        _share(rank, shared, own, outlines if rank == 0 else {}, read) for rank, own in enumerate(ranks)
    ]
    time = datetime.now(timezone.utc).isoformat(timespec="seconds")
    save_id, number, claim, alone = new_save_id(), begin(place), ExitStack(), Alone()
    named: dict[str, Any] = {"save_id": save_id, "name": None, "domains": [], "time": time}
    try:
        claim.enter_context(place.at(save_id).claim())
    except OSError as error:
        raise cannot_be_saved(place, error) from error
    about = {**members, **named}
    pending = Pending(place, save_id, number, shares, about, claim, alone, alone.mailbox(""), lambda: None)
    pending.run()
    pending.wait()


def _share(
    rank: int,
    shared: Mapping[str, Any],
    own: Mapping[str, Any],
    outlines: Mapping[Key, Outline],
    read: Callable[[Key], Tensor],
) -> Share:
    state = State()
    for key, outline in outlines.items():
        if outline.dtype not in DTYPES:
            raise CheckpointError(f"{key[1]}: torch has no dtype {outline.dtype}\nconvert it before")
        # On the meta device: the layout needs shapes and dtypes only, and `body` reads the data.
        tensor = torch.empty(outline.shape, dtype=DTYPES[outline.dtype], device="meta")
        state.leaves[key] = full_leaf(tensor, kind=outline.kind, layout=outline.layout)
        state.declared[key] = declare(state.leaves[key], any_replica_may_write=True)
    text = as_json(state.encode(dict(shared), "state")) if rank == 0 else None
    told = as_json(state.encode(dict(own), f"rank[{rank}]"))
    writes = {key: list(declared.boxes) for key, declared in state.declared.items()}
    layout = Layout.of("", state.declared, writes, state.leaves)

    def body() -> Iterator[memoryview]:
        for key in layout.keys:
            ((_, tensor),) = state.leaves[key].shards
            yield bytes_of(read(key) if tensor.is_meta else tensor)

    return Share(rank, layout, body(), told, text)

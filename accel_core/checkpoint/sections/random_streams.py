"""Random streams. In another world, streams start anew from seeds derived from rank 0's streams."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest

from accel_core.distributed.random import seed_streams, set_stream_states, stream_states
from accel_core.distributed.streams import check, reseed, restore, states
from accel_core.storage.tensor_bytes import bytes_of

if TYPE_CHECKING:
    from torch import Tensor

    from accel_core.checkpoint.tasks import Restoration, Save


def collect(save: Save) -> None:
    """Collect the state of each stream of this rank, for its own file."""
    run, state = save.run, save.state
    streams = {**stream_states(run), **states(run)}
    state.own["random"] = state.encode(streams, f"rank[{run.world.rank}].random", replicated=False)


def plan(load: Restoration) -> None:
    """Plan to restore the streams exactly in the same world, or to seed them from derived seeds."""
    with load.problems.noting_errors("random streams"):
        for action in _actions(load):
            load.copies.append(("random streams", action))


def _actions(load: Restoration) -> list[Callable[[], None]]:
    run, checkpoint, problems = load.run, load.checkpoint, load.problems
    streams: dict[str, Tensor] = checkpoint.decode(load.own["random"], "random")
    own = states(run)
    here = run.hooks.random_streams().keys() | own.keys()
    # "kind:index" names a device that the process sees beside the run's own device.
    beside = sorted(name for name in streams.keys() ^ here if ":" in name)
    if load.is_same_world and streams.keys() ^ here == {*beside}:
        if beside:
            seen = f"other devices are visible than when it was saved: {', '.join(beside)}"
            problems.warn(f"{seen}; the random streams of all others go on")
        known = {name: state for name, state in streams.items() if name in here - own.keys()}
        check(run, streams)
        return [partial(set_stream_states, run, known), partial(restore, run, streams)]
    if run.world.rank == 0:
        size = checkpoint.manifest.world["size"]
        same = size == run.world.size
        change = "the device has changed" if same else f"saved by {size} process(es), not {run.world.size}"
        problems.warn(f"{change}: random numbers, as of dropout, start anew, from derived seeds")
    first = checkpoint.decode(checkpoint.rank_state(0)["random"], "random")
    seeds = derived_seed(first, run.topology.reader), derived_seed(first, 0)
    actions: list[Callable[[], None]] = [
        partial(seed_streams, run, seeds[0]),
        partial(reseed, run, seeds[1]),
    ]
    if run.topology.reader == 0:  # loaders draw the orders of later epochs from rank 0's stream
        actions.append(partial(set_stream_states, run, {"torch": first["torch"]}))
    return actions


def derived_seed(streams: Mapping[str, Tensor], reader: int) -> int:
    """Return a reader's seed in another world, a hash of rank 0's saved streams and the reader's number."""
    content = b"".join(bytes(bytes_of(streams[name])) for name in sorted(streams))
    return xxh3_64_intdigest(content + reader.to_bytes(8, "big")) % (1 << 32)

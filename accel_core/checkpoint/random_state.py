"""Restore random streams. In another world, they are derived from rank 0's."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from xxhash import xxh3_64_intdigest

from accel_core.distributed.random import seed_streams, set_stream_states
from accel_core.distributed.streams import check, reseed, restore, states
from accel_core.storage.tensor_bytes import bytes_of

if TYPE_CHECKING:
    from torch import Tensor

    from accel_core.checkpoint.problems import Action, Problems
    from accel_core.contract.run import Run
    from accel_core.storage.tensors import Checkpoint


def plan_random(
    run: Run, checkpoint: Checkpoint, saved: Any, problems: Problems, *, same_world: bool
) -> list[Action]:
    """Actions that restore random streams.

    saved: this rank's streams, still encoded.
    """
    streams: dict[str, Tensor] = checkpoint.decode(saved, "random")
    own = states(run)
    here = run.hooks.random_streams().keys() | own.keys()
    # "kind:index" is a device that the process sees beside the run's own.
    beside = sorted(name for name in streams.keys() ^ here if ":" in name)
    if same_world and streams.keys() ^ here == {*beside}:
        if beside:
            seen = f"other devices are visible than when it was saved: {', '.join(beside)}"
            problems.warn(f"{seen}; the random streams of all others go on")
        known = {name: state for name, state in streams.items() if name in here - own.keys()}
        check(run, streams)
        actions = [partial(set_stream_states, run, known), partial(restore, run, streams)]
        return [("random streams", action) for action in actions]
    first = checkpoint.decode(checkpoint.rank_state(0)["random"], "random")
    seed = derived_seed(first, run.topology.reader)
    if run.world.rank == 0:
        size = checkpoint.manifest.world["size"]
        same = size == run.world.size
        change = "the device has changed" if same else f"saved by {size} process(es), not {run.world.size}"
        problems.warn(f"{change}: random numbers, as of dropout, start anew, from derived seeds")
    actions = [partial(seed_streams, run, seed), partial(reseed, run, derived_seed(first, 0))]
    if run.topology.reader == 0:  # loaders draw the orders of the next epochs from rank 0's
        actions.append(partial(set_stream_states, run, {"torch": first["torch"]}))
    return [("random streams", action) for action in actions]


def derived_seed(streams: Mapping[str, Tensor], reader: int) -> int:
    """Return a reader's seed in another world, from rank 0's saved streams."""
    content = b"".join(bytes(bytes_of(streams[name])) for name in sorted(streams))
    return xxh3_64_intdigest(content + reader.to_bytes(8, "big")) % (1 << 32)

"""Seed the random generators of a process, and make the generators of all ranks agree."""

from __future__ import annotations

import operator
import random
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from accel_core.contract.arguments import quoted
from accel_core.contract.run import current, live_runs
from accel_core.contract.world import RandomStream, rank_here
from accel_core.distributed.exchange import collective_call
from accel_core.distributed.streams import reseed
from accel_core.errors import ConfigError

if TYPE_CHECKING:
    from accel_core.contract.run import Run


def set_seed(
    seed: int, device_specific: bool = False, deterministic: bool = False, *, run: Run | None = None
) -> None:
    """Seed the generators of Python, NumPy, torch and every device. Not collective.

    Args:
        seed: the seed, equal on all ranks.
        device_specific: add the reader's number, so that only ranks that read the same data draw the same
            numbers (tensor parallel ranks must: each has a part of one model).
        deterministic: let torch use deterministic algorithms only.
        run: the only live run by default. If there is no live run, or several, `rank_here` takes the
            place of the reader's number.
    """
    seed = operator.index(seed)  # Python's generator refuses numbers of numpy and torch
    runs = list(live_runs)
    if run is None and len(runs) == 1:
        run = runs[0]
    if run is None:
        seed_process(seed + rank_here() * device_specific)
    else:
        seed_streams(run, seed + run.topology.reader * device_specific)
        reseed(run, seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def synchronize_rng_state(
    rng_type: str = "generator", generator: torch.Generator | None = None, *, run: Run | None = None
) -> None:
    """Set one random stream of every rank to the state of rank 0's stream. Collective.

    Args:
        rng_type: a stream that the stack knows (python, numpy, torch, a device type), or "generator" for
            `generator`.
        generator: the generator to synchronize.
        run: the only live run by default.

    Raises:
        ConfigError: this rank has no such stream; the message lists the streams that it has.
        CollectiveError: another rank calls something else.
    """
    run = run or current()
    with collective_call(run, "world", f"synchronize_rng_state({rng_type!r})", None, objects=True) as call:
        if rng_type == "generator" and generator is not None:
            stream = RandomStream(generator.get_state, generator.set_state)
        else:
            stream = _stream(run, rng_type)
        agreed = call.one_object(stream.get(), 0)
    stream.set(agreed)


def _stream(run: Run, rng_type: str) -> RandomStream:
    streams: Mapping[str, RandomStream] = run.hooks.random_streams()
    if rng_type not in streams:
        raise ConfigError(
            f"rng_types: there is no stream {quoted(rng_type)} here\n"
            f"choose among {', '.join(sorted(streams))}, or pass generator=... for 'generator'"
        )
    return streams[rng_type]


def synchronize_rng_states(
    rng_types: Sequence[str], generator: torch.Generator | None = None, *, run: Run | None = None
) -> None:
    """Call `synchronize_rng_state` for each type in `rng_types`. Collective."""
    for rng_type in rng_types:
        synchronize_rng_state(rng_type, generator, run=run)


def seed_process(seed: int) -> None:
    """Seed the generators of Python, torch and, if numpy is imported, numpy."""
    random.seed(seed)
    torch.manual_seed(seed)  # every device's generator too
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def seed_streams(run: Run, seed: int) -> None:
    """Seed the generators of this process that the stack knows."""
    for stream in run.hooks.random_streams().values():
        if stream.seed is not None:
            stream.seed(seed)


def stream_states(run: Run) -> dict[str, torch.Tensor]:
    """Return the states of the generators that the stack knows, by name."""
    return {name: stream.get() for name, stream in run.hooks.random_streams().items()}


def set_stream_states(run: Run, states: Mapping[str, torch.Tensor]) -> None:
    """Set the generators that have a state in `states`."""
    for name, stream in run.hooks.random_streams().items():
        if name in states:
            stream.set(states[name])

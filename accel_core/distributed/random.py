"""Seed random generators, and make those of all ranks agree."""

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

    device_specific: add the reader's number, so that ranks draw the same numbers only where they read the
    same data (tensor parallel ranks must: each has a part of one model). deterministic: let torch
    use deterministic algorithms only. Without a live run the world is the one that the launcher's
    variables describe.
    """
    seed = operator.index(seed)  # Python's own generator takes no number of numpy or torch
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
    """Give every rank the first rank's state of one stream. All ranks.

    rng_type: a stream that the stack knows (python, numpy, torch, a device type), or "generator" for
    the one given.

    Raises:
        ConfigError: there is no such stream here; it lists those there are.
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
    """`synchronize_rng_state` for each of `rng_types`. All ranks."""
    for rng_type in rng_types:
        synchronize_rng_state(rng_type, generator, run=run)


def seed_process(seed: int) -> None:
    """Seed the generators of Python, torch and, if it is loaded, numpy."""
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
    """Set those of the generators that have a state in `states`."""
    for name, stream in run.hooks.random_streams().items():
        if name in states:
            stream.set(states[name])

"""Random streams of units whose model or sequences are split.

Ranks with the same activations must draw the same random numbers (dropout behind a layer that all of them
computed). All other ranks must draw different numbers, and a draw outside the unit must change neither. A
unit's forwards therefore draw from a stream that is forked when the unit is prepared. The stream is seeded
from one seed for the world, the unit's name, and the rank's number along the mesh dimensions without
`same_activations` (`MeshDim`). Megatron-LM's RNG tracker (`model_parallel_cuda_manual_seed`: its default
state is shared by a tensor parallel group, and differs by pipeline rank and data parallel rank) and
torchtitan's `set_determinism` (distinct seeds along `pp`, equal seeds along the other dimensions) do the
same. Recomputation needs no support: torch's `checkpoint` restores the state that the forward had.

A unit whose mesh only splits samples has no stream, and pays nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accel_core.distributed.exchange import collective_call

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel_core.contract.run import Run
    from accel_core.contract.unit import Unit


class Stream:
    """The random stream of one unit; `state` is a generator state of the run's device."""

    def __init__(self, device: torch.device, name: str, number: int, seed: int) -> None:
        self.name, self.number = name, number
        module: Any = torch.random if device.type == "cpu" else torch.get_device_module(device)
        where = () if device.type == "cpu" else (device,)
        self._get: Callable[[], Tensor] = lambda: module.get_rng_state(*where)
        self._set: Callable[[Tensor], None] = lambda state: module.set_rng_state(state, *where)
        self._manual_seed = (torch.default_generator if device.type == "cpu" else module).manual_seed
        self._inside = False
        self.seed(seed)

    def seed(self, seed: int) -> None:
        """Restart the stream from a seed, the same on all ranks."""
        text = f"{seed} {self.name} {self.number}".encode()
        before = self._get()
        self._manual_seed(int.from_bytes(hashlib.sha256(text).digest()[:7], "little"))
        self.state = self._get()
        self._set(before)

    @contextmanager
    def drawn_from(self) -> Iterator[None]:
        """Make this stream the device's generator during a forward."""
        if self._inside:  # forwards of one unit nest
            yield
            return
        before = self._get()
        self._inside = True
        self._set(self.state)
        try:
            yield
        finally:
            self.state = self._get()
            self._set(before)
            self._inside = False


def fork(unit: Unit) -> Stream | None:
    """Return a new unit's stream, or None if its mesh splits samples only.

    Collective.
    """
    number = None if unit.mesh is None else unit.mesh.stream()
    if number is None:
        return None
    with collective_call(unit.run, "world", f"the random stream of {unit.name}", None, objects=True) as call:
        seed: int = call.one_object(torch.initial_seed(), 0)
    return Stream(unit.run.device, unit.name, number, seed)


def reseed(run: Run, seed: int) -> None:
    """Restart all streams from a seed, the same on all ranks."""
    for stream in _streams(run).values():
        stream.seed(seed)


def states(run: Run) -> dict[str, Tensor]:
    """Return the state of each stream, by its name in a checkpoint."""
    return {name: stream.state for name, stream in _streams(run).items()}


def check(run: Run, saved: Mapping[str, Tensor]) -> None:
    """Raise torch's error if a saved state is invalid; changes nothing."""
    for name, stream in _streams(run).items():
        before = stream._get()
        try:
            stream._set(saved[name])
        finally:
            stream._set(before)


def restore(run: Run, saved: Mapping[str, Tensor]) -> None:
    """Continue all streams from saved states."""
    for name, stream in _streams(run).items():
        stream.state = saved[name]


def _streams(run: Run) -> dict[str, Stream]:
    return {f"unit {unit.name}": unit.stream for unit in run.units if unit.stream is not None}

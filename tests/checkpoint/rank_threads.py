"""Several ranks in one process: a thread each, with collectives over a barrier. For properties."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore

from accel_core import Accelerator, Leaf, Topology
from accel_testing.patience import patience

SECONDS = patience(20)


class Barred:
    """A rank's collectives."""

    def __init__(self, rank: int, slots: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(slots)
        self._slots, self._barrier = slots, barrier

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.all_gather_object(tensor))

    def all_gather_object(self, value: Any) -> list[Any]:
        self._slots[self.rank] = value
        self._barrier.wait(SECONDS)
        found = list(self._slots)
        self._barrier.wait(SECONDS)
        return found

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        return self.all_gather_object(value)[source]

    def barrier(self) -> None:
        self._barrier.wait(SECONDS)


class SharedStore(HashStore):
    """One store for all threads."""

    def clone(self) -> SharedStore:
        return self


class State:
    """What a rank's user registered."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def in_ranks(
    leaves: Sequence[dict[str, Leaf]], state: State, action: Callable[[Accelerator], object]
) -> None:
    """Call `action` with a run for each rank, which holds these leaves of buffers of one module."""
    size = len(leaves)
    slots, barrier, store = [None] * size, threading.Barrier(size), SharedStore()
    accelerators = [_make(rank, size, leaves[rank], state) for rank in range(size)]
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        run = accelerators[rank].run
        run.world = attrs.evolve(run.world, rank=rank, size=size, store=store)
        run.topology = Topology(reader=rank, readers=size)
        control = Barred(rank, slots, barrier)
        run.collectives = lambda dim: control
        try:
            action(accelerators[rank])
        except BaseException as error:  # the others must not wait for it
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for accelerator in accelerators:
        accelerator.run.checkpoints.forget_groups()
        accelerator.end_training()
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error


def _make(rank: int, size: int, leaves: dict[str, Leaf], state: State) -> Accelerator:
    accelerator, module = Accelerator(device="cpu"), nn.Module()
    for name in leaves:
        module.register_buffer(name, torch.zeros(()))
    accelerator.prepare(module)
    accelerator.register_for_checkpointing(state)
    accelerator.run.units[0].hooks.model_state = lambda unit: leaves
    return accelerator

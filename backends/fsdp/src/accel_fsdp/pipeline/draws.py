"""Random numbers that all stages of a pipeline have to draw alike.

`forward_loss` runs in each stage of a micro-batch, up to the next stage. Numbers that it draws before it
calls the model must be the same in all stages: noise that is input of the first and target of the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["Draws"]

State = tuple[Tensor, ...]


class Draws:
    """The process's streams of torch, as the micro-batches of one window find them.

    apart: the device's stream for draws after the model's call, which the last stage alone makes.
    """

    def __init__(self, device: torch.device, apart: Callable[[], AbstractContextManager[Any]]) -> None:
        self._device, self._apart = device, apart
        self._module = None if device.type == "cpu" else torch.get_device_module(device)
        self._begun: dict[int, State] = {}
        """Micro-batch -> the state of the streams as its draws before the model begin."""
        self._called: State | None = None
        self._host: Tensor | None = None
        """The host's stream apart, if the device has its own."""
        self._rest = ExitStack()

    def forget(self) -> None:
        """Count no micro-batch as begun."""
        self._begun.clear()

    @contextmanager
    def of(self, number: int) -> Iterator[None]:
        """Run `forward_loss` of this micro-batch, once for each of the rank's stages.

        Draws before the model's call are the same each time, and all that later micro-batches go on from.
        """
        is_first, before = number not in self._begun, self._get()
        if is_first:
            self._begun[number] = before
        else:
            self._set(self._begun[number])
        self._called = None
        try:
            yield
        finally:
            self._rest.close()
            if self._called is not None:
                self._set(self._called if is_first else before)

    def note_call(self) -> None:
        """Note the draws before the model's call, which begins."""
        self._called = self._get()

    def note_end(self) -> None:
        """Draw the rest from streams apart."""
        self._rest.enter_context(self._apart())
        if self._module is not None:
            self._rest.enter_context(self._host_apart())

    @contextmanager
    def _host_apart(self) -> Iterator[None]:
        before = torch.get_rng_state()
        if self._host is None:
            self._host = torch.Generator().manual_seed(torch.initial_seed() ^ 1).get_state()
        torch.set_rng_state(self._host)
        try:
            yield
        finally:
            self._host = torch.get_rng_state()
            torch.set_rng_state(before)

    def _get(self) -> State:
        host = torch.get_rng_state()
        return (host,) if self._module is None else (host, self._module.get_rng_state(self._device))

    def _set(self, state: State) -> None:
        torch.set_rng_state(state[0])
        if self._module is not None:
            self._module.set_rng_state(state[1], self._device)

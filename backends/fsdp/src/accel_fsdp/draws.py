"""Random numbers that all stages of a pipeline have to draw alike.

`forward_loss` runs in each stage of a micro-batch, up to the next stage. What it draws before it calls the
model (noise that is input of the first stage and target of the last, say) must be the same in all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

__all__ = ["Draws"]

State = tuple[Tensor, ...]


class Draws:
    """The process's streams of torch, as the micro-batches of one window find them.

    apart: the stream for draws after the model's call, which the last stage alone makes.
    """

    def __init__(self, device: torch.device, apart: Callable[[], AbstractContextManager[Any]] | None) -> None:
        module = None if device.type == "cpu" else torch.get_device_module(device)
        self._device, self._module, self._apart = device, module, apart or nullcontext
        self._begun: dict[int, State | None] = {}
        """Micro-batch -> where its draws before the model begin; None if there are none."""
        self._start: State | None = None
        self._called: State | None = None
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
        begin = None if is_first else self._begun[number]
        if begin is not None:
            self._set(begin)
        self._note_start(before if begin is None else begin)
        try:
            yield
        finally:
            self._rest.close()
            called = self._called
            if is_first:
                self._begun[number] = None if called is None else before
            if called is not None:
                self._set(called if is_first else before)

    def _note_start(self, state: State) -> None:
        self._start, self._called = state, None

    def note_call(self) -> None:
        """Note the draws before the model's call, which begins."""
        now = self._get()
        if self._start is not None and not all(map(torch.equal, now, self._start)):
            self._called = now

    def note_end(self) -> None:
        """Draw the rest from a stream apart, if the next micro-batch would repeat it."""
        if self._called is not None:
            self._rest.enter_context(self._apart())

    def _get(self) -> State:
        host = torch.get_rng_state()
        return (host,) if self._module is None else (host, self._module.get_rng_state(self._device))

    def _set(self, state: State) -> None:
        torch.set_rng_state(state[0])
        if self._module is not None:
            self._module.set_rng_state(state[1], self._device)

"""The process's random streams, which the user's data may draw an order from.

An epoch that is read again gives its order again only from the states that it was begun with.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from attrs import field, frozen
from torch import Tensor

from accel_core.data.position import Streams
from accel_core.distributed.logging import get_logger

_logger = get_logger(__name__)


@frozen(kw_only=True)
class ProcessStreams:
    """The streams of Python, NumPy, torch and devices, and the user's generators.

    read, write: the hooks `rng_state` and `set_rng_state`. generators: those given to a loader, by role.
    """

    read: Callable[[], Mapping[str, Tensor]]
    write: Callable[[Mapping[str, Tensor]], None]
    generators: Mapping[str, torch.Generator] = field(factory=dict)

    def states(self) -> dict[str, str]:
        """Return the states as they are now."""
        own = {role: generator.get_state() for role, generator in self.generators.items()}
        return {name: encode(state) for name, state in {**self.read(), **own}.items()}

    def restore(self, states: Streams) -> None:
        """Set the streams that are here to these states."""
        tensors = {name: decode(state) for name, state in states.items()}
        for role in self.generators.keys() & tensors.keys():
            self.generators[role].set_state(tensors[role])
        here = self.read().keys() & tensors.keys()
        self.write({name: tensors[name] for name in here})

    def warn_of_draws(self, what: str, first: Streams, before: Streams) -> None:
        """Warn if an order that was read up to here again may be another one.

        It may be where it is drawn while it is read, and other code has drawn between the reads.

        first: the states once the first item was read. before: those that the program had stopped with.
        """
        now = self.states()
        mixed = [
            name for name, state in now.items() if state not in (first.get(name, state), before.get(name))
        ]
        if mixed:
            _logger.warning(
                "%s draws from the random stream %s while it is read, which cannot be repeated here: the rest"
                " of this epoch may lose samples, or repeat them; draw the whole order at the start of the"
                " epoch, or from a generator that set_epoch seeds",
                what,
                ", ".join(sorted(mixed)),
            )


def encode(state: Tensor) -> str:
    """Return a generator's state (uint8) as text."""
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def decode(text: str) -> Tensor:
    """Return the generator state that `encode` wrote."""
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


@contextmanager
def preserve_rng(generators: Mapping[str, torch.Generator]) -> Iterator[None]:
    """Leave generators, and torch's default one, as they were before."""
    held = [torch.default_generator, *generators.values()]
    states = [generator.get_state() for generator in held]
    try:
        yield
    finally:
        for generator, state in zip(held, states, strict=True):
            generator.set_state(state)

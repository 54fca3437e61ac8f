"""Source of an epoch's order, on which all readers agree.

The source is recorded, and the order is drawn from it again on resume.

Seeds and states are drawn at the points at which plain PyTorch draws them, so that one process sees the same
order. An order is read as a whole when its epoch begins, so that nothing else draws between its items.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor
from torch.utils.data import RandomSampler, SequentialSampler

from accel_core.data.position import Progress, decode, encode
from accel_core.data.sharding import split_head

MODULUS = 2**63  # seeds travel as int64


@frozen(kw_only=True)
class Shuffle:
    """Makes the orders of one loader's epochs.

    Attributes:
        items: the sampler (or the user's batch sampler) that gives the order.
        agree: returns the bytes (uint8, on the CPU) of the world's first rank; None if one process reads.
        seedable: derive each epoch's seed from (data_seed, epoch) instead of drawing it.
        data_seed: seed of `seedable`; None: torch's initial seed.
    """

    items: Any
    agree: Callable[[Tensor], Tensor] | None = None
    seedable: bool = False
    data_seed: int | None = None
    _initial: list[int] = field(factory=list, init=False)

    def open(self, progress: Progress, wanted: int) -> tuple[list[Any], Iterator[Any]]:
        """Return (the first `wanted` items of the order, the items from `progress.start` on).

        Sets `progress.drawn`. Collective if the order is random.
        """
        return split_head(self._order(progress), wanted, progress.start)

    @property
    def name(self) -> str:
        """The sampler's class name, and whether it draws with replacement."""
        replaces = " with replacement" if getattr(self.items, "replacement", False) else ""
        return f"{type(self.items).__qualname__}{replaces}"

    @property
    def length(self) -> int | None:
        """Number of items per epoch; None if the sampler has no length."""
        try:
            return len(self.items)
        except (TypeError, NotImplementedError):
            return None

    @property
    def generator(self) -> torch.Generator | None:
        """The user's own generator from which the order is drawn, if any."""
        for holder in (self.items, getattr(self.items, "sampler", None)):
            generator = getattr(holder, "generator", None)
            if isinstance(generator, torch.Generator):
                return generator
        return None

    def agreed(self, seed: int) -> int:
        """Return the seed of the world's first rank. Collective."""
        if self.agree is None:
            return seed
        own = torch.frombuffer(bytearray(seed.to_bytes(8, "little")), dtype=torch.uint8)
        return int.from_bytes(self.agree(own).numpy().tobytes(), "little")

    def _order(self, progress: Progress) -> Iterable[Any]:
        if type(self.items) is SequentialSampler:
            return range(len(self.items))
        if _plain_random(self.items) and (self.items.generator is None or self.seedable):
            return self._seeded(progress)
        with self._drawing(progress):
            return self._read()

    def _read(self) -> Iterable[Any]:
        """Read at once as many items as the sampler's length, and one more to find its end.

        A sampler may have no length, or no end.
        """
        items = iter(self.items)
        return chain([*islice(items, (self.length or 0) + 1)], items)

    def _seeded(self, progress: Progress) -> Iterable[int]:
        if progress.drawn is None:
            progress.drawn = self._seed(progress.epoch)
        sampler = copy.copy(self.items)
        sampler.generator = torch.Generator()
        if isinstance(progress.drawn, str):  # saved with a generator that this loader does not have now
            sampler.generator.set_state(decode(progress.drawn))
        else:
            sampler.generator.manual_seed(progress.drawn)
        return sampler  # type: ignore[no-any-return]

    def _seed(self, epoch: int) -> int:
        if self.seedable:
            if not self._initial:
                given = torch.initial_seed() if self.data_seed is None else self.data_seed
                self._initial.append(self.agreed(given % MODULUS))
            return (self._initial[0] + epoch) % MODULUS
        # The same draw as in RandomSampler.__iter__. Every rank draws; the first rank's seed is used.
        return self.agreed(drawn_seed(None))

    @contextmanager
    def _drawing(self, progress: Progress) -> Iterator[None]:
        """Return a context in which the sampler draws from the epoch's own state.

        Afterwards its generator has advanced, as in plain PyTorch. The generator's state is restored if the
        order was drawn from another state: from a seed, on resume, or (for torch's default generator, from
        which a rank also draws its dropout) from another rank's state.
        """
        own = self.generator
        generator = own or torch.default_generator
        before, is_resumed = generator.get_state(), progress.drawn is not None
        if self.seedable and not is_resumed:
            progress.drawn = self._seed(progress.epoch)
        elif not is_resumed:
            progress.drawn = encode(before if self.agree is None else self.agree(before.clone()))
        if isinstance(progress.drawn, str):
            generator.set_state(decode(progress.drawn))
        else:
            generator.manual_seed(progress.drawn or 0)
        is_others = own is None and not torch.equal(generator.get_state(), before)
        try:
            yield
        finally:
            if is_resumed or is_others or self.seedable:
                generator.set_state(before)


def drawn_seed(generator: torch.Generator | None) -> int:
    """Return a seed, drawn as torch's loaders and samplers draw their seeds."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator).item())


def _plain_random(sampler: Any) -> bool:
    return isinstance(sampler, RandomSampler) and type(sampler).__iter__ is RandomSampler.__iter__

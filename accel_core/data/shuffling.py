"""Source of an epoch's order, on which all readers agree.

The source is recorded, and the order is drawn again on resume.

Seeds and states are drawn where plain PyTorch draws them, so that one process sees the same order
and the same generators afterwards.
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
from torch.utils.data import RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from accel_core.data.position import Progress, Streams
from accel_core.data.process_streams import ProcessStreams, decode, encode
from accel_core.data.sharding import split_head

_MODULUS = 2**63  # seeds travel as int64
_TORCHS = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_DRAWN_TOGETHER = 32  # indices that RandomSampler draws at once, with replacement


@frozen(kw_only=True)
class Shuffle:
    """The way in which the epochs of one loader get their orders.

    items: the sampler (or the user's batch sampler) that the order comes from.
    agree: gives the bytes (uint8, on the CPU) of the world's first rank; None in a world of one.
    follows: this rank is not that first one.
    seedable: derive each epoch's seed from (data_seed, epoch) instead of drawing it.
    streams: of the process, which samplers of the user's own may draw from.
    as_read: torch's samplers draw while they are read, which a loop that is left early does not finish.
    """

    items: Any
    streams: ProcessStreams
    agree: Callable[[Tensor], Tensor] | None = None
    follows: bool = False
    seedable: bool = False
    data_seed: int | None = None
    as_read: bool = False
    _initial: list[int] = field(factory=list, init=False)

    def open(self, progress: Progress, wanted: int) -> tuple[list[Any], Iterator[Any]]:
        """Return (`wanted` first items of the order, those from `progress.start`).

        Collective where the order is random. Sets `progress.drawn`.
        """
        if type(self.items) is SequentialSampler:
            return split_head(range(len(self.items)), wanted, progress.start)
        if _plain_random(self.items) and (self.items.generator is None or self.seedable):
            return split_head(self._seeded(progress), wanted, progress.start)
        if type(self.items) in _TORCHS:
            with self._drawing(progress):
                return split_head(self._order(progress), wanted, progress.start)
        if progress.resumed:
            return self._replayed(progress, wanted)
        progress.streams = (self._other_streams(),)
        with self._drawing(progress):
            return split_head(self._order(progress), wanted, progress.start)

    @property
    def name(self) -> str:
        """The sampler's class, and whether it draws with replacement."""
        replaces = " with replacement" if getattr(self.items, "replacement", False) else ""
        return f"{type(self.items).__qualname__}{replaces}"

    def _replayed(self, progress: Progress, wanted: int) -> tuple[list[Any], Iterator[Any]]:
        """Read the order of the user's own sampler again, as `open` does."""
        streams, others, before = self.streams, self._other_streams(), self.streams.states()
        streams.restore(next(iter(progress.streams), {}))
        try:
            with self._drawing(progress):
                items = iter(self._order(progress))
                first = list(islice(items, 1))
                begun = streams.states()
                opened = split_head(chain(first, items), wanted, progress.start)
                if self._is_apart:  # draws in between did not reach it
                    del begun["torch"]
                streams.warn_of_draws(type(self.items).__name__, begun, before)
                return opened
        finally:
            streams.restore(others)

    def _order(self, progress: Progress) -> Iterable[Any]:
        """Return the epoch's order; inside `_drawing`."""
        if self._at_once:
            return self._whole(progress)
        return _apart(self.items) if self._is_apart else self.items

    @property
    def _is_apart(self) -> bool:
        return self.agree is not None and self.generator is None

    def _other_streams(self) -> Streams:
        """Return states of the streams beside torch's: `_drawing` sets that one."""
        return {name: state for name, state in self.streams.states().items() if name != "torch"}

    @property
    def generator(self) -> torch.Generator | None:
        """The user's own generator that the order is drawn from, if any."""
        for holder in (self.items, getattr(self.items, "sampler", None)):
            generator = getattr(holder, "generator", None)
            if isinstance(generator, torch.Generator):
                return generator
        return None

    @property
    def _at_once(self) -> bool:
        # torch's samplers draw while they run, RandomSampler even at its end. The user's generator may have
        # other users, so all drawing has to happen at one moment, or a resume could not repeat it.
        return isinstance(self.items, _TORCHS) and self.generator is not None and not self.as_read

    def _whole(self, progress: Progress) -> list[Any]:
        """Return the epoch's order, drawn at once.

        A RandomSampler's generator is left as its first draw leaves it: `catch_up` makes the others.
        """
        if not self._draws_again:
            return list(self.items)
        indices = iter(self.items)
        order = list(islice(indices, self._indices_per_draw))
        assert self.generator is not None
        state = self.generator.get_state()
        order.extend(indices)
        if not progress.resumed:
            self.generator.set_state(state)
            progress.draws = 1
        return order

    def catch_up(self, progress: Progress, asked: int | None = None) -> None:
        """Make a RandomSampler's draws once it was asked for so many indices.

        asked: None once it was asked for its end.
        The order holds them already. The user's generator makes them at this moment, as in plain PyTorch, so
        that it stands there too where a loop is left early.
        """
        if progress.draws >= 0 and self._draws_again:
            total = self.items.num_samples // self._indices_per_draw + 1
            due = total if asked is None else min((asked - 1) // self._indices_per_draw + 1, total)
            self.draw_until(progress, due)

    def draw_until(self, progress: Progress, due: int) -> None:
        """Make the epoch's draws up to the one of this number."""
        items = self.items
        for number in range(progress.draws, due):
            left = items.num_samples - number * self._indices_per_draw
            count = min(self._indices_per_draw, left) if items.replacement else None
            if count != 0:
                next(iter(RandomSampler(items.data_source, items.replacement, count, items.generator)))
        progress.draws = max(progress.draws, due)

    @property
    def _draws_again(self) -> bool:
        """True for torch's RandomSampler, which draws at its end too."""
        return _plain_random(self.items) and self._at_once and not self.seedable

    @property
    def _indices_per_draw(self) -> int:
        return _DRAWN_TOGETHER if self.items.replacement else len(self.items.data_source)

    def _seeded(self, progress: Progress) -> Iterable[int]:
        if progress.drawn is None:
            progress.drawn = self._seed(progress.epoch)
        sampler = copy.copy(self.items)
        sampler.generator = torch.Generator()
        if isinstance(progress.drawn, str):  # by a generator that this loader is not given any more
            sampler.generator.set_state(decode(progress.drawn))
        else:
            sampler.generator.manual_seed(progress.drawn)
        return sampler  # type: ignore[no-any-return]

    def _seed(self, epoch: int) -> int:
        if self.seedable:
            if not self._initial:
                given = torch.initial_seed() if self.data_seed is None else self.data_seed
                self._initial.append(self._agreed(given % _MODULUS))
            return (self._initial[0] + epoch) % _MODULUS
        # The very draw of RandomSampler.__iter__: every rank makes it, the first one's counts.
        return self._agreed(int(torch.empty((), dtype=torch.int64, device="cpu").random_().item()))

    def _agreed(self, seed: int) -> int:
        if self.agree is None:
            return seed
        own = torch.frombuffer(bytearray(seed.to_bytes(8, "little")), dtype=torch.uint8)
        return int.from_bytes(self.agree(own).numpy().tobytes(), "little")

    @contextmanager
    def _drawing(self, progress: Progress) -> Iterator[None]:
        """Inside, the sampler draws from the epoch's own state.

        The generator that it draws from is afterwards put back, or left where drawing has moved it:

            generator        epoch                          afterwards
            torch's default  new, seedable                  put back: the seed comes from elsewhere
            torch's default  new, follows another state     put back: dropout goes on from the rank's own
            torch's default  new, else                      left: so does plain torch
            torch's default  resumed                        put back: its streams have moved on since
            the user's       resumed, drawn at once         put back, likewise
            the user's       any other                      left: the sampler may go on drawing from it
        """
        own = self.generator
        generator = own or torch.default_generator
        if not progress.resumed:
            self.catch_up(progress)  # the epoch before was saved with its last batch
            progress.draws = -1
        before = generator.get_state()
        if isinstance(progress.drawn, str):
            generator.set_state(decode(progress.drawn))
        elif self.seedable or progress.drawn is not None:
            progress.drawn = self._seed(progress.epoch) if progress.drawn is None else progress.drawn
            generator.manual_seed(int(progress.drawn))
        else:
            state = before if self.agree is None else self.agree(before.clone())
            generator.set_state(state)
            progress.drawn = encode(state)
        is_apart = self.follows and not torch.equal(generator.get_state(), before)
        try:
            yield
        except BaseException:
            generator.set_state(before)
            raise
        if own is None:
            put_back = progress.resumed or self.seedable or is_apart
        else:
            put_back = progress.resumed and self._at_once
        if put_back:
            generator.set_state(before)


def _apart(items: Iterable[Any]) -> Iterator[Any]:
    """Yield items of a sampler that may draw while it runs.

    Each is drawn from the state that the one before has left. Otherwise, other draws of a rank in between
    would change its order.
    """
    generator, iterator = torch.default_generator, iter(items)
    state = generator.get_state()
    while True:
        others = generator.get_state()
        is_moved = not torch.equal(others, state)
        if is_moved:
            generator.set_state(state)
        try:
            item = next(iterator)
        except StopIteration:
            return
        finally:
            state = generator.get_state()
            if is_moved:
                generator.set_state(others)
        yield item


def _plain_random(sampler: Any) -> bool:
    return isinstance(sampler, RandomSampler) and type(sampler).__iter__ is RandomSampler.__iter__

"""What a DataLoader gives, with its end known while the last batch is held."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, pairwise
from typing import Any

from accel_core.data.dispatch import Round
from accel_core.data.position import Progress
from accel_core.data.sharding import COMPLETE, cut, with_last

__all__ = ["announce", "dealt", "own", "remove", "whole_rounds"]


def dealt(batches: Iterator[Any], progress: Progress, readers: int) -> Iterator[Round]:
    """Map-style data's rounds, from the batches of all readers in turn. The feed knows the next round."""
    first = progress.count + 1
    for number, group in enumerate(cut(batches, readers), start=first):
        following = 0 if number == progress.total else progress.takers.get(number + 1, readers)
        real = progress.padded.get(number, COMPLETE)
        yield Round(group, real, following, progress.drawn if number == first else None)


def whole_rounds(stated: Iterator[tuple[Any, Any]], progress: Progress) -> Iterator[Round]:
    """An iterable dataset's rounds, from (shares, state of the loader after them).

    Its end is known only by reading one ahead.
    """
    end: Any = (([], COMPLETE), None)
    for ((batches, real), state), ((following, _), _) in pairwise(chain(stated, [end])):
        progress.state = state
        yield Round(batches, real, len(following))


def own(stated: Iterator[tuple[Any, Any]], progress: Progress, sharded: bool) -> Iterator[Any]:
    """An iterable dataset's batches. The same holds of their end."""
    for number, ((item, state), last) in enumerate(with_last(stated), start=progress.count + 1):
        (batch,), real = item if sharded else ((item,), COMPLETE)
        if real != COMPLETE:
            progress.padded[number] = real
        if last:
            progress.total = number
        progress.state = state
        yield batch


def announce(epoch: int, *holders: Any) -> None:
    """Tell datasets and samplers that shuffle by epoch which one begins."""
    seen: list[Any] = []
    for holder in (*holders, *(getattr(holder, "sampler", None) for holder in holders)):
        if hasattr(holder, "set_epoch") and not any(holder is other for other in seen):
            seen.append(holder)
            holder.set_epoch(epoch)


def remove(active: list[Any], loader: object) -> None:
    """Take the last mention of `loader` out of the list."""
    for place in reversed(range(len(active))):
        if active[place] is loader:
            del active[place]
            return

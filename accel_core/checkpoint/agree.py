"""Ranks act together: what fails on one fails on all, at once, and says where."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from accel_core.errors import CheckpointError

if TYPE_CHECKING:
    from accel_core.world import Collectives

__all__ = ["agree"]

T = TypeVar("T")


def agree(control: Collectives, action: Callable[[], T]) -> T:
    """What `action` returns on this rank, once it has succeeded on every rank. Collective.

    Raises:
        CheckpointError: it failed somewhere; the message has each rank's failure. One that all ranks
            have alike is raised as it is.
    """
    error: Exception | None = None
    try:
        result = action()
    except Exception as raised:  # whatever it is, the other ranks are waiting for our word
        error = raised
    failures: dict[str, list[str]] = {}
    if control.size > 1:
        for rank, vote in enumerate(control.all_gather_object(error and f"{type(error).__name__}: {error}")):
            if vote is not None:
                failures.setdefault(vote, []).append(str(rank))
    if error is not None and (control.size == 1 or _is_everyones(failures, control.size)):
        raise error
    if failures:
        said = [f"rank {', '.join(ranks)}: {failure}" for failure, ranks in failures.items()]
        raise CheckpointError("\n".join(said), path=getattr(error, "path", None)) from error
    return result


def _is_everyones(failures: Mapping[str, Sequence[str]], size: int) -> bool:
    return len(next(iter(failures.values()))) == size

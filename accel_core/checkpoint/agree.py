"""Ranks act together: what fails on one fails on all, at once, and says where."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from accel_core.errors import CheckpointError

if TYPE_CHECKING:
    from accel_core.contract.world import Collectives

__all__ = ["agree"]

T = TypeVar("T")


def agree(control: Collectives, action: Callable[[], T]) -> T:
    """What `action` returns on this rank, once it has succeeded on every rank. Collective.

    Raises:
        CheckpointError: it failed somewhere; the message has each rank's failure. One that all ranks
            have alike is raised as it is; else it is of the most special kind among them.
    """
    error: Exception | None = None
    try:
        result = action()
    except Exception as raised:  # whatever it is, the other ranks are waiting for our word
        error = raised
    kind = type(error) if isinstance(error, CheckpointError) else CheckpointError
    votes = control.all_gather_object(error and (kind, f"{type(error).__name__}: {error}"))
    if error is not None and len(set(votes)) == 1:
        raise error
    said = [f"rank {rank}: {vote[1]}" for rank, vote in enumerate(votes) if vote is not None]
    if said:
        kind = max((vote[0] for vote in votes if vote is not None), key=lambda kind: len(kind.__mro__))
        raise kind("\n".join(said), path=getattr(error, "path", None)) from error
    return result

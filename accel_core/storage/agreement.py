"""One step of several ranks: done on all of them, or raised on all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from accel_core.errors import CheckpointError, CollectiveError

T = TypeVar("T")


def agree(gather: Callable[[Any], Sequence[Any]], step: str, action: Callable[[], T]) -> list[T]:
    """Run `action` on every rank; return each rank's result, in rank order. Collective.

    Args:
        gather: returns the objects that all ranks pass, in rank order.
        step: in words; must be the same on all ranks.
        action: what this rank does.

    Raises:
        CheckpointError: `action` failed on some rank; the message has each rank's failure. A failure that all
            ranks have alike is raised as it is; otherwise the error has the most special class among them.
        CollectiveError: ranks make different steps.
    """
    error: Exception | None = None
    result: Any = None
    try:
        result = action()
    except Exception as raised:  # whatever it is, the other ranks are waiting for this one's word
        error = raised
    kind = type(error) if isinstance(error, CheckpointError) else CheckpointError
    failure = None if error is None else (kind, f"{type(error).__name__}: {error}")
    steps, failures, results = zip(*gather((step, failure, result)), strict=True)
    try:
        if len(set(steps)) > 1:
            _refuse_difference(steps)
        if error is not None and len(set(failures)) == 1:
            raise error
        failed = {rank: each for rank, each in enumerate(failures) if each is not None}
        if failed:
            kind = max((kind for kind, _ in failed.values()), key=lambda kind: len(kind.__mro__))
            text = "\n".join(f"rank {rank}: {said}" for rank, (_, said) in failed.items())
            raise kind(text, path=getattr(error, "path", None)) from error
    finally:
        error = None  # its traceback has this frame: a cycle would keep what was read until it is collected
    return list(results)


def _refuse_difference(calls: Sequence[str]) -> NoReturn:
    listed = "\n".join(f"  rank {rank}: {call}" for rank, call in enumerate(calls))
    message = f"{calls[0]}: ranks make different calls\n{listed}\ncall it on all ranks alike"
    raise CollectiveError(message, operation=calls[0], found=calls)

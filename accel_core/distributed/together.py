"""Run one step of a collective operation on all ranks, or raise on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from accel_core.contract.world import current_operation
from accel_core.distributed.exchange import Call, exchange_objects
from accel_core.distributed.mailbox import mailbox_of
from accel_core.distributed.progress import show_progress
from accel_core.storage.ranks import agree

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from accel_core.contract.run import Run
    from accel_core.contract.world import Collectives
    from accel_core.storage.protocols import Measure
    from accel_core.storage.ranks import StoreMailbox

T = TypeVar("T")


class RunComm:
    """The `accel_core.storage.protocols.Comm` of a run's ranks. The constructor is collective."""

    def __init__(self, run: Run) -> None:
        self._control = run.collectives("control")
        self._mailbox = mailbox_of(run)
        self.rank = run.world.rank
        self.nodes: Sequence[int] = self.together("save_state or load_state", lambda: run.world.node_rank)

    def together(self, step: str, action: Callable[[], T]) -> list[T]:
        """See `gather_from_all_ranks`."""
        return gather_from_all_ranks(self._control, step, action)

    def mailbox(self, key: str) -> StoreMailbox:
        """Return the mailbox whose messages have this key."""
        return self._mailbox.under(key)

    def shown(self, text: str, measure: Measure | None = None) -> AbstractContextManager[None]:
        """Show progress on the main process."""
        return show_progress(text, measure)


def agree_on_call(run: Run, operation: str, description: str = "") -> None:
    """Return once every rank makes the same call. Collective.

    Args:
        run: the run whose ranks call.
        operation: name of the operation, for errors; must be equal on all ranks.
        description: the arguments in words; must be equal on all ranks.

    Raises:
        CollectiveError: a rank calls another operation, passes something else, or did not come.
    """
    if run.world.size == 1:
        return
    gather_from_all_ranks(run.collectives("control"), operation, lambda: None, description)


def run_on_all_ranks(control: Collectives, step: str, action: Callable[[], T]) -> T:
    """Return this rank's result of `action`, once it has succeeded on every rank.

    Collective. Raises the errors of `gather_from_all_ranks`.
    """
    results: list[T] = []
    gather_from_all_ranks(control, step, lambda: results.append(action()))
    return results[0]


def gather_from_all_ranks(
    control: Collectives, step: str, action: Callable[[], T], description: str = ""
) -> list[T]:
    """Run `action` on every rank; return each rank's result, in rank order.

    Collective.

    Args:
        control: collectives of the control group.
        step: name of the step, for errors; must be equal on all ranks.
        action: the function that this rank runs.
        description: the arguments in words; must be equal on all ranks.

    Raises:
        CheckpointError: `action` failed on some rank; the message has each rank's failure. A failure that
            all ranks share is raised as it is; else the error has the most derived class among the failures.
        CollectiveError: ranks make different steps.
    """
    before = current_operation.get()
    try:  # Ctrl-C may come between any two instructions
        return agree(partial(_gather, control, Call(step, words=description)), step, action)
    finally:
        current_operation.set(before)


def _gather(control: Collectives, call: Call, vote: Any) -> Sequence[Any]:
    current_operation.set(call)  # errors of collectives inside name this call
    return exchange_objects(control, call, vote, call.words)

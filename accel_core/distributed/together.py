"""One step of a collective operation: done on all ranks, or raised on all."""

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
    """The ranks of a run, as storage asks for them: see `accel_core.storage.protocols.Comm`.

    Made by all ranks.
    """

    def __init__(self, run: Run) -> None:
        self._control = run.collectives("control")
        self._mailbox = mailbox_of(run)
        self.rank = run.world.rank
        self.nodes: Sequence[int] = self.together("save_state or load_state", lambda: run.world.node_rank)

    def together(self, step: str, action: Callable[[], T]) -> list[T]:
        """See `gather_from_all_ranks`."""
        return gather_from_all_ranks(self._control, step, action)

    def mailbox(self, key: str) -> StoreMailbox:
        """Return the mailbox of this key."""
        return self._mailbox.under(key)

    def shown(self, text: str, measure: Measure | None = None) -> AbstractContextManager[None]:
        """Show it on the main process."""
        return show_progress(text, measure)


def agree_on_call(run: Run, operation: str, description: str = "") -> None:
    """Return once every rank makes the same call. Collective.

    description: of what the call passes, in words; must be the same on all ranks.

    Raises:
        CollectiveError: ranks call another operation or pass something else, or one did not come.
    """
    if run.world.size == 1:
        return
    gather_from_all_ranks(run.collectives("control"), operation, lambda: None, description)


def run_on_all_ranks(control: Collectives, step: str, action: Callable[[], T]) -> T:
    """Return this rank's result of `action`, once it has succeeded on every rank.

    Collective; raises as `gather_from_all_ranks`.
    """
    results: list[T] = []
    gather_from_all_ranks(control, step, lambda: results.append(action()))
    return results[0]


def gather_from_all_ranks(
    control: Collectives, step: str, action: Callable[[], T], description: str = ""
) -> list[T]:
    """Run `action` on every rank; return each rank's result, in rank order.

    Collective.

    step, description: in words; must be the same on all ranks.

    Raises:
        CheckpointError: `action` failed on some rank; the message has each rank's failure. One that all
            ranks have alike is raised as it is; else it is of the most special kind among them.
        CollectiveError: ranks make different steps.
    """
    before = current_operation.get()
    try:  # Ctrl-C may come between any two instructions
        return agree(partial(_gather, control, Call(step, words=description)), step, action)
    finally:
        current_operation.set(before)


def _gather(control: Collectives, call: Call, vote: Any) -> Sequence[Any]:
    current_operation.set(call)  # what an error says that is raised inside
    return exchange_objects(control, call, vote, call.words)

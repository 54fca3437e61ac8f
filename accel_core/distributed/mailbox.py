"""The mailbox of a run's ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_core.distributed.process_group import timeout_of
from accel_core.storage.ranks import StoreMailbox

if TYPE_CHECKING:
    from accel_core.contract.run import Run


def mailbox_of(run: Run) -> StoreMailbox:
    """Return a mailbox of the run's ranks."""
    from torch._C._distributed_c10d import HashStore

    store = run.world.store
    return StoreMailbox(HashStore() if store is None else store, run.world.rank, timeout_of(run))

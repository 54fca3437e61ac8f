"""Worker processes of prepared loaders: they ignore stop signals, and their rank ends them.

Schedulers signal all processes of a job. If such a signal ended a worker, its rank would fail before it has
saved.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import cache
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

from attrs import frozen

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

STOPS: Final = frozenset(
    number
    for number in signal.Signals
    if number.name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")
)
"""Signals by which people and schedulers stop a job."""
HAS_MASKS: Final = hasattr(signal, "pthread_sigmask")
"""False on Windows, where signals go to one process."""
_workers: Final = WeakSet[BaseProcess]()


def iterate(loader: DataLoader[Any]) -> Iterator[Any]:
    """Return `iter(loader)`, whose workers leave stop signals to this process."""
    if not (loader.num_workers and HAS_MASKS):
        return iter(loader)
    _end_at_exit(os.getpid())
    own = loader.worker_init_fn
    loader.worker_init_fn = LeavesStops(own)
    # Workers inherit the mask: a signal that comes before they are initialized waits.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        iterator: Any = iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        loader.worker_init_fn = own
    _workers.update(getattr(iterator, "_workers", ()))
    return iterator  # type: ignore[no-any-return]


@frozen
class LeavesStops:
    """Initializer of a worker, which leaves stop signals to its rank.

    Attributes:
        initialize: the user's own initializer.
    """

    initialize: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        """Initialize the worker. Called in the worker, before it reads."""
        for number in STOPS:
            # Not SIG_IGN, which programs that the dataset starts would inherit.
            signal.signal(number, _leave)
            signal.siginterrupt(number, False)  # system calls of the dataset's libraries go on
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
        if self.initialize is not None:
            self.initialize(worker)


def _leave(number: int, frame: object) -> None:
    """Do nothing: the rank got the signal too, or does not have to stop."""


@cache
def _end_at_exit(process: int) -> None:
    """Kill the remaining workers when `process`, the id of this process, ends.

    multiprocessing would send SIGTERM, which workers ignore, and wait for them. The id is the key of the
    cache: a fork has workers of its own.
    """
    del process
    Finalize(None, _end_workers, exitpriority=0)


def _end_workers() -> None:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises for a killed worker
    for worker in multiprocessing.active_children():
        if worker in _workers:
            worker.kill()

"""End the runs that a script leaves behind or drops, when the interpreter ends."""

from __future__ import annotations

import gc
import os
import sys
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING

from accel_core.contract.run import live_runs
from accel_core.distributed.process_group import has_groups
from accel_core.distributed.stderr import tell
from accel_core.errors import CheckpointError, uncaught_error

if TYPE_CHECKING:
    from accel_core.contract.run import Run


_dropped: list[Run] = []


def end_at_exit(run: Run) -> None:
    """Keep a run that its program has dropped until `end_runs`."""
    _dropped.append(run)


def finish_dropped() -> None:
    """Finish the trackers of runs that their program has dropped, so that a sweep keeps few files open.

    The rest of these runs stays until `end_runs`: ranks collect garbage at different times but must leave
    their process group together, and the loss of a save that a thread still writes is reported at exit.
    """
    if has_groups():  # runs and groups are in reference cycles, which Python collects late
        gc.collect()
    for run in [run for run in _dropped if run.process == os.getpid()]:  # not the parent's runs, in a fork
        try:
            run.trackers.finish()
        except Exception:  # a tracker may raise anything, and must not fail the run that is being made
            traceback.print_exc()


def end_runs() -> None:
    """End the runs of this process that are not ended; exit with status 1 if a save was lost."""
    # A wrapped model, a process group, or a thread inside torch that is alive when the interpreter ends
    # aborts the process now and then; a script that never calls end_training must exit cleanly too.
    # After an exception the group is left alone: ending it might wait for ranks that never come.
    failed, lost = uncaught_error() is not None, False
    for run in (*_dropped, *live_runs):
        if run.process != os.getpid():  # this process is a fork: the run and its save belong to the parent
            continue
        try:
            run.end(failed=failed)
        except BaseException as error:  # a save, a plugin or Ctrl-C may raise; the other runs must end too
            failure = _failed_save(error)
            if failure is error:
                tell(f"accel: {error}\n")
            else:
                traceback.print_exc()
            # Ctrl-C interrupts the wait for a save. Other errors, such as a tracker's, lose no training.
            lost = lost or failure is not None or isinstance(error, KeyboardInterrupt)
    if lost:  # an exception raised at exit would only be printed, and the job would count as done
        with suppress(AttributeError, OSError, ValueError):  # stdout is None, full or closed
            sys.stdout.flush()
        os._exit(1)


def _failed_save(error: BaseException | None) -> CheckpointError | None:
    """Return the failure of a save: this error, or an error in its chain of contexts; else None."""
    while error is not None and not isinstance(error, CheckpointError):
        error = error.__context__
    return error

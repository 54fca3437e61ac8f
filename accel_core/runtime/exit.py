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
    """Finish the trackers of runs that their program has dropped: else a sweep runs out of files.

    The rest of these runs stays until `end_runs`. Ranks collect garbage at different times, and have to leave
    their process group alike; and the loss of a save that a thread still writes is told at exit.
    """
    if has_groups():  # runs and groups are in cycles, which Python would keep for long
        gc.collect()
    for run in [run for run in _dropped if run.process == os.getpid()]:  # else its parent's, in a fork
        try:
            run.trackers.finish()
        except Exception:  # of a tracker: the run that is being made is not to blame
            traceback.print_exc()


def end_runs() -> None:
    """End the runs of this process that are not ended; exit with status 1 if a save was lost."""
    # A wrapped model, a process group, or a thread inside torch that is alive when the interpreter ends
    # aborts the process now and then; a script that never calls end_training must exit cleanly too.
    # After an exception the group is left alone: ending it might wait for ranks that never come.
    failed, lost = uncaught_error() is not None, False
    for run in (*_dropped, *live_runs):
        if run.process != os.getpid():  # a fork's: the run, and its save, are its parent's
            continue
        try:
            run.end(failed=failed)
        except BaseException as error:  # of a save, of a plugin, or Ctrl-C; the other runs must end too
            failure = _failed_save(error)
            if failure is error:
                tell(f"accel: {error}\n")
            else:
                traceback.print_exc()
            # Ctrl-C cuts the wait for a save short. Anything else that cannot be closed loses no training.
            lost = lost or failure is not None or isinstance(error, KeyboardInterrupt)
    if lost:  # raised here it would be printed and forgotten: the job would count as done
        with suppress(AttributeError, OSError, ValueError):  # none, full, or closed
            sys.stdout.flush()
        os._exit(1)


def _failed_save(error: BaseException | None) -> CheckpointError | None:
    """Return the failure of a save: this error, or one that came before it."""
    while error is not None and not isinstance(error, CheckpointError):
        error = error.__context__
    return error

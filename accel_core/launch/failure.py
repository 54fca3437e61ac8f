"""Find the worker that failed first, whose failure is reported."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from accel_core.errors import LaunchError
from accel_core.launch.signals import ENDING_SECONDS


def first_failure(failures: Mapping[int, ProcessFailure]) -> LaunchError:
    """Return the failure that made the other ranks fail. `failures`: rank -> its failure."""
    noted = {rank: at for rank in failures if (at := _note_of(failures[rank]).get("time")) is not None}
    earliest = min(noted.values(), default=float("inf"))

    def order(rank: int) -> tuple[int, float]:
        failure = failures[rank]
        if rank in noted:
            reports_another = _note_of(failure).get("of") is not None
            return 2 if reports_another else 1, noted[rank]
        if failure.exitcode == -signal.SIGTERM or failure.timestamp > earliest + ENDING_SECONDS - 5:
            return 3, failure.timestamp  # ended by torch's agent
        if failure.exitcode == -signal.SIGABRT:
            return 2, failure.timestamp  # as libraries do when a peer is gone
        return 0, failure.timestamp  # died without a note: other ranks noticed it before the agent did

    rank = min(failures, key=order)
    return _described(rank, failures[rank])


def noted_failures(files: Mapping[tuple[int, int], Path]) -> dict[int, ProcessFailure]:
    """Return rank -> failure, for workers that have noted a failure.

    torch lists only workers whose processes had ended when it looked, but the worker that failed first may
    end last.

    Args:
        files: (rank, local rank) -> the worker's error file.
    """
    found = {
        rank: ProcessFailure(local_rank=local, pid=0, exitcode=1, error_file=str(file))
        for (rank, local), file in files.items()
        if file.is_file()
    }
    # Programs other than accel-core's worker may have written an error file in torch's own format.
    return {rank: failure for rank, failure in found.items() if "time" in _note_of(failure)}


def _note_of(failure: ProcessFailure) -> Mapping[str, Any]:
    message = failure.error_file_data["message"]
    return {**message["extraInfo"], "message": message["message"]} if isinstance(message, dict) else {}


def _described(rank: int, failure: ProcessFailure) -> LaunchError:
    note = _note_of(failure)
    # A script may exit with any number, of which the system keeps 8 bits. A signal shows in the exit code of
    # the process only, not in a note.
    code = int(note["code"]) & 0xFF if "code" in note else failure.exitcode
    how = f"exited with code {code}"
    if note.get("py_callstack"):
        how = f"failed: {note['message'].splitlines()[0]}\n{note['py_callstack']}"
    elif code < 0:
        how = f"was killed by {failure.signal_name()}"
    if code == -signal.SIGKILL:
        how += "\nthe system kills processes when memory runs out: see `dmesg`"
    told = f"rank {rank} (local {failure.local_rank}) {how}".rstrip("\n")
    return LaunchError(told, exit_code=128 - code if code < 0 else code, rank=rank)

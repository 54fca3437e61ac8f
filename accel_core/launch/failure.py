"""Find the worker that failed first, which is the one to report."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from accel_core.errors import LaunchError
from accel_core.launch.mapped import cut_files

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

AGENT_KILLS_AFTER: Final = 30
"""Seconds that torch's agent gives the other workers between SIGTERM and SIGKILL."""


def first_failure(
    failures: Mapping[int, ProcessFailure], notes: Mapping[int, str] | None = None
) -> LaunchError:
    """Return the failure that made the other ranks fail.

    notes: local rank -> its error file, which torch names only where it exists.
    """
    noted = {rank: at for rank in failures if (at := _note_of(failures[rank]).get("time")) is not None}
    earliest = min(noted.values(), default=float("inf"))

    def order(rank: int) -> tuple[int, float]:
        failure = failures[rank]
        if rank in noted:
            return 1, noted[rank]
        if failure.exitcode == -signal.SIGTERM or failure.timestamp > earliest + AGENT_KILLS_AFTER - 5:
            return 3, failure.timestamp  # ended by the agent
        if failure.exitcode == -signal.SIGABRT:
            return 2, failure.timestamp  # as libraries do when a peer is gone
        return 0, failure.timestamp  # gone without a note: the other ranks noticed before the agent did

    rank = min(failures, key=order)
    return _told(rank, failures[rank], (notes or {}).get(failures[rank].local_rank, ""))


def noted_failures(notes: Mapping[int, str]) -> Iterator[ProcessFailure]:
    """Yield the failures that workers have noted.

    torch lists those whose processes had ended when it looked, and one that failed first may end last.
    """
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    for local, file in notes.items():
        if Path(file).is_file():
            failure = ProcessFailure(local_rank=local, pid=0, exitcode=1, error_file=file)
            if "time" in _note_of(failure):  # else the script's, of another program
                yield failure


def _note_of(failure: ProcessFailure) -> Mapping[str, Any]:
    message = failure.error_file_data["message"]
    return {**message["extraInfo"], "message": message["message"]} if isinstance(message, dict) else {}


def _told(rank: int, failure: ProcessFailure, file: str) -> LaunchError:
    note = _note_of(failure)
    # A script may ask to exit with any number, of which the system keeps a byte. Only the process itself
    # tells of a signal.
    code = int(note["code"]) & 0xFF if "code" in note else failure.exitcode
    how = f"exited with code {code}"
    if note.get("py_callstack"):
        how = f"failed: {note['message'].splitlines()[0]}\n{note['py_callstack']}"
    elif code < 0:
        how = f"was killed by {failure.signal_name()}"
    if code == -signal.SIGKILL:
        how += "\nthe system kills processes when memory runs out: see `dmesg`"
    if code == -signal.SIGBUS:
        how += "".join(f"\na mapped file was cut: {file}" for file in cut_files(file))
    told = f"rank {rank} (local {failure.local_rank}) {how}".rstrip("\n")
    return LaunchError(told, exit_code=128 - code if code < 0 else code, rank=rank)

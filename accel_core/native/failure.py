"""How workers ended, and which of them ended first: the one to tell the user about."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

__all__ = ["Failure", "earliest_note", "first_failure"]

AGENT_KILLS_AFTER: Final = 30
"""Seconds that torch's agent gives the other workers between SIGTERM and SIGKILL."""


@frozen(kw_only=True)
class Failure:
    """How one worker ended."""

    rank: int
    local_rank: int
    exit_code: int
    """As a shell reports it: 128 + n for signal n."""
    message: str
    traceback: str

    @property
    def headline(self) -> str:
        """One line: which rank, and how it ended."""
        return f"rank {self.rank} (local {self.local_rank}) {self.message}"

    @property
    def report(self) -> str:
        """The headline, then the traceback, whose last line is the error's own."""
        return f"{self.headline}\n{self.traceback}".rstrip("\n")


def first_failure(failures: Mapping[int, ProcessFailure]) -> Failure:
    """Of all failed ranks the one whose failure made the others fail."""
    noted = [time for failure in failures.values() if (time := _note_of(failure).get("time"))]
    earliest = min(noted, default=float("inf"))

    def order(rank: int) -> tuple[int, float]:
        failure = failures[rank]
        at = _note_of(failure).get("time")
        if at is not None:
            return 1, at
        if failure.exitcode == -signal.SIGTERM or failure.timestamp > earliest + AGENT_KILLS_AFTER - 5:
            return 3, failure.timestamp  # ended by the agent
        if failure.exitcode == -signal.SIGABRT:
            return 2, failure.timestamp  # as libraries do when a peer is gone
        return 0, failure.timestamp  # gone without a word: the others noticed before the agent did

    rank = min(failures, key=order)
    return _describe(rank, failures[rank])


def _note_of(failure: ProcessFailure) -> Mapping[str, Any]:
    message = failure.error_file_data["message"]
    extra = message.get("extraInfo", {}) if isinstance(message, dict) else {}
    return {**extra, "message": message["message"]} if extra else {}


def _describe(rank: int, failure: ProcessFailure) -> Failure:
    note = _note_of(failure)
    code = int(note.get("code", failure.exitcode))
    if note.get("py_callstack"):
        message = f"failed: {note['message'].splitlines()[0]}"
    elif code < 0:
        message = f"was killed by {failure.signal_name()}"
        if -code == signal.SIGKILL:
            message += "\nthe system kills processes when memory runs out: see `dmesg`"
    else:
        message = f"exited with code {code}"
    return Failure(
        rank=rank,
        local_rank=failure.local_rank,
        exit_code=128 - code if code < 0 else code,
        message=message,
        traceback=note.get("py_callstack", ""),
    )


def earliest_note(paths: Iterable[str]) -> str:
    """` (its first line)` of the first failure noted in these files; empty if none was."""
    noted = [json.loads(path.read_text("utf-8"))["message"] for path in map(Path, paths) if path.exists()]
    noted.sort(key=lambda note: note["extraInfo"]["time"])
    return f" ({noted[0]['message'].splitlines()[0]})" if noted else ""

"""Output of workers: files for each rank, and whole lines with their rank on the terminal."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Final, TextIO

from attrs import define, field
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest

from accel_core.distributed.stderr import tell
from accel_core.errors import LaunchError
from accel_core.launch.worker import LOGGED, process_file

if TYPE_CHECKING:
    from accel_core.contract.job import Job
    from accel_core.launch.nodes import Nodes

POLL_SECONDS: Final = 0.1


class WorkerLogs(DefaultLogsSpecs):
    """Paths for the notes of workers, and for their output in a job with `log_dir` or `tee`.

    File names contain the rank and the attempt: `rank-00003.attempt-0.out`. No file is written twice.
    """

    def __init__(self, folder: str, job: Job, nodes: Nodes) -> None:
        super().__init__(log_dir=folder)
        self.notes: Mapping[tuple[int, int], Path] = {}
        """(rank, local rank) -> the error file of the worker in the last attempt."""
        self._folder, self._job, self._nodes = Path(job.log_dir or folder), job, nodes
        self._tailer: _Tailer | None = None

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return the paths for one attempt, and set the attempt's number in each worker's variables."""
        self.end()
        for variables in envs.values():
            variables["TORCHELASTIC_RESTART_COUNT"] = str(self._nodes.attempt)
            variables["TORCHELASTIC_MAX_RESTARTS"] = str(self._job.max_restarts)
        places = super().reify(envs)
        ranks = {local: int(variables["RANK"]) for local, variables in envs.items()}
        self.notes = {(rank, local): Path(places.error_files[local]) for local, rank in ranks.items()}
        tee = self._job.tee
        if self._job.log_dir is None and tee == "none":
            return places
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            attempt = _new_attempt(self._folder, ranks.values())
        except OSError as error:
            raise LaunchError(
                f"launch.log_dir: the files of the workers cannot be made: {error}\n"
                "give a folder that this user may write, on a disk with room"
            ) from error
        tailed = []
        for local, rank in ranks.items():
            if self._job.log_dir is not None:
                envs[local][LOGGED] = "1"
            streams = (("out", places.stdouts, sys.stdout), ("err", places.stderrs, sys.stderr))
            for ending, paths, stream in streams:
                path = _file(self._folder, rank, attempt, ending)
                paths[local] = str(path)
                if tee == "all" or (tee == "main" and rank == 0):
                    tailed.append(_Tailed(path, rank, stream))
        self._tailer = _Tailer(tailed)
        return places

    def processes(self) -> list[int]:
        """Return the process IDs of the workers that have started."""
        found = []
        for note in self.notes.values():
            with suppress(OSError, ValueError):  # not yet, or not whole yet
                found.append(int(process_file(str(note)).read_text(encoding="ascii")))
        return found

    def end(self) -> None:
        """Print the remaining output of the last attempt, whose workers have ended."""
        self.notes = {}
        if self._tailer is not None:
            self._tailer.end()
            self._tailer = None


def _file(folder: Path, rank: int, attempt: int, ending: str) -> Path:
    return folder / f"rank-{rank:05d}.attempt-{attempt}.{ending}"


def _new_attempt(folder: Path, ranks: Collection[int]) -> int:
    """Return the first attempt number without files of these ranks, other jobs' files included.

    Creates the attempt's files, so that a job which starts at the same time takes another number.
    """
    for attempt in count():
        with suppress(FileExistsError):
            for rank in ranks:
                _file(folder, rank, attempt, "out").touch(exist_ok=False)
            return attempt
    raise AssertionError  # count does not end


@define
class _Tailed:
    """A file that a worker writes, and the position up to which it was printed."""

    path: Path
    rank: int
    stream: TextIO
    _position: int = field(default=0, init=False)
    _rest: bytes = field(default=b"", init=False)

    def print(self, *, whole: bool) -> None:
        """Print the new lines of the file; with `whole`, also a last line without a newline."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._position)
                read = file.read()
        except FileNotFoundError:  # the worker has not started
            return
        self._position += len(read)
        *lines, rest = (self._rest + read).split(b"\n")
        self._rest = rest[rest.rfind(b"\r", 0, -1) + 1 :]  # only the last state of a progress bar
        if whole and self._rest:
            lines, self._rest = [*lines, self._rest], b""
        self.stream.writelines(f"[rank {self.rank}] {_shown(line)}\n" for line in lines)
        self.stream.flush()


def _shown(line: bytes) -> str:
    """Return the text of a line after its last carriage return, as a terminal would show it."""
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")


class _Tailer(threading.Thread):
    """Thread that prints new lines of all files; a single thread keeps lines whole."""

    def __init__(self, files: Sequence[_Tailed]) -> None:
        super().__init__(name="accel-worker-output", daemon=True)
        self._files, self._over = files, threading.Event()
        self.start()

    def run(self) -> None:
        """Print lines until the workers have ended."""
        while not self._over.wait(POLL_SECONDS):
            self._print(whole=False)

    def end(self) -> None:
        """Stop the thread and print the remaining lines."""
        self._over.set()
        self.join()
        self._print(whole=True)

    def _print(self, *, whole: bool) -> None:
        for file in self._files:
            try:
                file.print(whole=whole)
            except OSError as error:  # nobody reads the pipe, or the disk is full: the workers go on
                self._files = [other for other in self._files if other.stream is not file.stream]
                with suppress(OSError):  # else Python's flush at exit would fail again
                    os.dup2(os.open(os.devnull, os.O_WRONLY), file.stream.fileno())
                tell(f"accel: output of the workers is printed no more: {error}\n")

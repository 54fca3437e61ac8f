"""Output of workers: files for each rank, and lines with their rank."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Final, TextIO

from attrs import define, field
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest

from accel_core.errors import LaunchError
from accel_core.launch.worker import LOGGED

if TYPE_CHECKING:
    from accel_core.contract.job import Job

POLL_SECONDS: Final = 0.1


class WorkerLogs(DefaultLogsSpecs):
    """torch's places of the workers' output, for a job with `log_dir` or `tee`.

    A file has the rank and the attempt in its name: `rank-00003.attempt-0.out`. No file is written twice.
    With `log_format` json, `rank-00003.attempt-0.jsonl` has the lines of both streams, as they were read.
    """

    def __init__(self, notes: str, job: Job) -> None:
        super().__init__(log_dir=notes)
        self._job, self._notes = job, notes
        self._follower: _Follower | None = None

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return the places for one attempt."""
        self.end()
        places, job = super().reify(envs), self._job
        if job.log_dir is None and job.tee == "none":
            return places
        folder = Path(job.log_dir or self._notes)
        ranks = {local: int(variables["RANK"]) for local, variables in envs.items()}
        json_files: dict[int, list[_Sink]] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            attempt = _new_attempt(folder, ranks.values())
            if job.log_format == "json" and job.log_dir is not None:
                for rank in ranks.values():
                    json_files[rank] = [_Sink.of_file(_file(folder, rank, attempt, "jsonl"))]
        except OSError as error:
            raise LaunchError(
                f"launch.log_dir: the files of the workers cannot be made: {error}\n"
                "give a folder that this user may write, on a disk with room"
            ) from error
        files = []
        for local, rank in ranks.items():
            if job.log_dir is not None:
                envs[local][LOGGED] = "1"
            is_printed = job.tee == "all" or (job.tee == "main" and rank == 0)
            for ending, paths in (("out", places.stdouts), ("err", places.stderrs)):
                path = _file(folder, rank, attempt, ending)
                paths[local] = str(path)
                sinks = [*json_files.get(rank, ()), *([_Sink(ending)] if is_printed else ())]
                line = _tagged(rank) if job.log_format == "text" else _object(envs[local], ending)
                files.append(_Followed(path, line, sinks))
        self._follower = _Follower([file for file in files if file.sinks])
        return places

    def end(self) -> None:
        """Write and print what the workers of the last attempt have left."""
        if self._follower is not None:
            self._follower.end()
            self._follower = None


def _file(folder: Path, rank: int, attempt: int, ending: str) -> Path:
    return folder / f"rank-{rank:05d}.attempt-{attempt}.{ending}"


def _new_attempt(folder: Path, ranks: Collection[int]) -> int:
    """Return the number after all attempts of these ranks, in other jobs too.

    Makes its files, so that a job which starts at the same time takes another.
    """
    while True:
        taken = [path.name for rank in ranks for path in folder.glob(f"rank-{rank:05d}.attempt-*.out")]
        attempt = max((int(name.split(".")[1].removeprefix("attempt-")) for name in taken), default=-1) + 1
        try:
            for rank in ranks:
                _file(folder, rank, attempt, "out").touch(exist_ok=False)
        except FileExistsError:
            continue
        return attempt


def _tagged(rank: int) -> Callable[[str], str]:
    """Return what makes a line of text of a rank's line."""
    return lambda text: f"[rank {rank}] {text}\n"


def _object(variables: Mapping[str, str], ending: str) -> Callable[[str], str]:
    """Return what makes a JSON object of a worker's line, with the time of reading."""
    rank, node, stream = int(variables["RANK"]), int(variables["GROUP_RANK"]), f"std{ending}"

    def line(text: str) -> str:
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        told = {"time": now, "node": node, "rank": rank, "stream": stream, "text": text}
        return json.dumps(told) + "\n"  # ASCII: a terminal that cannot spell a letter would break the object

    return line


@define(eq=False)
class _Sink:
    """A place that lines go to: a file, or this process's own stream.

    ending: "out" or "err", for the stream.
    """

    ending: str
    file: TextIO | None = None
    _is_gone: bool = field(default=False, init=False)

    @classmethod
    def of_file(cls, path: Path) -> _Sink:
        return cls("", path.open("x", encoding="utf-8", newline="\n"))

    def write(self, lines: Sequence[str]) -> None:
        """Write whole lines; after an error, none any more."""
        stream = self.file or (sys.stdout if self.ending == "out" else sys.stderr)
        if self._is_gone:
            return
        try:
            stream.writelines(lines)
            stream.flush()
        except OSError as error:  # nobody reads the pipe, the disk is full: the workers go on
            self._is_gone = True
            _give_up(stream, error, "printed" if self.file is None else f"written to {self.file.name}")

    def close(self) -> None:
        if self.file is not None:
            with suppress(OSError):  # it was told when the line was written
                self.file.close()


@define
class _Followed:
    """A file that a worker writes, and what was read of it.

    line: makes the line of a text. sinks: where lines go.
    """

    path: Path
    line: Callable[[str], str]
    sinks: Sequence[_Sink]
    _position: int = field(default=0, init=False)
    _rest: bytes = field(default=b"", init=False)

    def copy(self, *, whole: bool) -> None:
        """Hand on its new lines; with `whole`, also one that has no end yet."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._position)
                read = file.read()
        except FileNotFoundError:  # its worker has not started
            return
        self._position += len(read)
        *lines, rest = (self._rest + read).split(b"\n")
        self._rest = rest[rest.rfind(b"\r", 0, -1) + 1 :]  # of a bar, what a terminal would show
        if whole and self._rest:
            lines, self._rest = [*lines, self._rest], b""
        written = [self.line(_shown(line)) for line in lines]
        for sink in self.sinks if written else ():
            sink.write(written)


def _shown(line: bytes) -> str:
    """Return what a terminal would show of a line."""
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")


def _give_up(stream: TextIO, error: OSError, done: str) -> None:
    """Write nothing more there, not at exit either, and say so."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    with suppress(OSError):
        sys.stderr.write(f"accel: output of the workers is {done} no more: {error}\n")
        sys.stderr.flush()


class _Follower(threading.Thread):
    """Thread that hands on what is written to files; one, so lines stay whole."""

    def __init__(self, files: Sequence[_Followed]) -> None:
        super().__init__(name="accel-worker-output", daemon=True)
        self._files, self._over = files, threading.Event()
        self.start()

    def run(self) -> None:
        """Hand lines on until the workers have ended."""
        while not self._over.wait(POLL_SECONDS):
            for file in self._files:
                file.copy(whole=False)

    def end(self) -> None:
        self._over.set()
        self.join()
        for file in self._files:
            file.copy(whole=True)
        for sink in {sink for file in self._files for sink in file.sinks}:
            sink.close()

"""Output of workers: files for each rank, and lines after their rank."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO

from attrs import define, field
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest

from accel_core.launch.worker import LOGGED

if TYPE_CHECKING:
    from accel_core.contract.job import Job

__all__ = ["WorkerLogs"]

POLL_SECONDS: Final = 0.1


class WorkerLogs(DefaultLogsSpecs):
    """torch's places of the workers' output, for a job with `log_dir` or `tee`.

    A file has the rank and the attempt in its name: `rank-00003.attempt-0.out`. No file is written twice.
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
        folder.mkdir(parents=True, exist_ok=True)
        ranks = {local: int(variables["RANK"]) for local, variables in envs.items()}
        attempt = _free_attempt(folder, ranks.values())
        files = []
        for local, rank in ranks.items():
            if job.log_dir is not None:
                envs[local][LOGGED] = "1"
            for ending, paths in (("out", places.stdouts), ("err", places.stderrs)):
                path = _file(folder, rank, attempt, ending)
                paths[local] = str(path)
                if job.tee == "all" or (job.tee == "main" and rank == 0):
                    files.append(_Followed(path, f"[rank {rank}] ", ending))
        self._follower = _Follower(files)
        return places

    def end(self) -> None:
        """Print what the workers of the last attempt have left to print."""
        if self._follower is not None:
            self._follower.end()
            self._follower = None


def _file(folder: Path, rank: int, attempt: int, ending: str) -> Path:
    return folder / f"rank-{rank:05d}.attempt-{attempt}.{ending}"


def _free_attempt(folder: Path, ranks: Any) -> int:
    """Return the number after all attempts of these ranks, in earlier jobs too."""
    taken = [path.name for rank in ranks for path in folder.glob(f"rank-{rank:05d}.attempt-*.out")]
    return max((int(name.split(".")[1].removeprefix("attempt-")) for name in taken), default=-1) + 1


@define
class _Followed:
    """A file that a worker writes, and what was read of it."""

    path: Path
    tag: str
    ending: str
    _position: int = field(default=0, init=False)
    _rest: bytes = field(default=b"", init=False)

    def copy(self, *, whole: bool) -> None:
        """Print its new lines; with `whole`, also one that has no end yet."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._position)
                read = file.read()
        except FileNotFoundError:  # its worker has not started
            return
        self._position += len(read)
        *lines, self._rest = (self._rest + read).split(b"\n")
        if whole and self._rest:
            lines, self._rest = [*lines, self._rest], b""
        stream: TextIO = sys.stdout if self.ending == "out" else sys.stderr
        stream.writelines(f"{self.tag}{line.decode(errors='replace')}\n" for line in lines)
        stream.flush()


class _Follower(threading.Thread):
    """Thread that prints what is written to files; one, so lines stay whole."""

    def __init__(self, files: Sequence[_Followed]) -> None:
        super().__init__(name="accel-worker-output", daemon=True)
        self._files, self._over = files, threading.Event()
        self.start()

    def run(self) -> None:
        """Print until the workers have ended."""
        while not self._over.wait(POLL_SECONDS):
            for file in self._files:
                file.copy(whole=False)

    def end(self) -> None:
        self._over.set()
        self.join()
        for file in self._files:
            file.copy(whole=True)

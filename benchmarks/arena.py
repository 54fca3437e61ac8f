"""Contenders in processes of their own that take turns: what slows the machine slows all of them alike.

Standard library only: contenders run in other environments.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

HERE = Path(__file__).parent
MARK = "> "
Clock = Callable[[], float]
T = TypeVar("T")
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
"""Of every contender: modules stay compiled from one start to the next, as they do for people."""


class Row(NamedTuple):
    """A line of the table. None: not measured."""

    what: str
    raw: float | None
    accelerate: float | None
    fabric: float | None
    ours: float
    bar: str
    unit: str


class Contender:
    """`script OPTIONS NAME` under one interpreter, in one process a rank, waiting for its turn."""

    def __init__(self, name: str, python: str, script: str, ranks: int = 1, *options: str) -> None:
        shared = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1"}
        shared |= {"MASTER_PORT": free_port(), "OMP_NUM_THREADS": 1}
        self.name = name
        self.errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - until `end`
        self.processes = [
            subprocess.Popen(
                [python, str(HERE / script), *options, name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.errors,
                text=True,
                env=ENVIRONMENT | {key: str(value) for key, value in ranked(shared, rank, ranks).items()},
            )
            for rank in range(ranks)
        ]

    def turn(self, case: str) -> float:
        """Run one round of a case; what rank 0 measured."""
        return self.turns(case)[0]

    def turns(self, case: str) -> list[float]:
        """Run one round of a case; what each rank measured."""
        for process in self.processes:
            process.stdin.write(case + "\n")
            process.stdin.flush()
        return self.answers()

    def answers(self) -> list[float]:
        """The next figure of each rank."""
        found = []
        for process in self.processes:
            line = next((line for line in process.stdout if line.startswith(MARK)), None)
            if line is None:
                self.errors.seek(0)
                raise RuntimeError(f"{self.name} died:\n{self.errors.read()[-2000:]}")
            found.append(float(line[len(MARK) :]))
        return found

    def end(self) -> None:
        for process in self.processes:
            process.stdin.close()
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
        self.errors.close()


def ranked(shared: Mapping[str, object], rank: int, ranks: int) -> dict[str, object]:
    """What torchrun would set; nothing in a world of one."""
    if ranks == 1:
        return {"OMP_NUM_THREADS": 1}
    return {**shared, "RANK": rank, "LOCAL_RANK": rank}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def serve(cases: Mapping[str, Callable[[], float]]) -> None:
    """The contender's side: one figure for each case that stdin names."""
    print(f"{MARK}0", flush=True)
    for line in sys.stdin:
        print(f"{MARK}{cases[line.strip()]()}", flush=True)


@contextmanager
def contest(script: str, peers: str | None, ranks: int = 1) -> Iterator[dict[str, Contender]]:
    """The contenders of a script, warm. The peers have a raw loop beside them, in their environment."""
    pythons = {"raw": sys.executable, "ours": sys.executable}
    if peers:
        pythons |= {"raw-peers": peers, "accelerate": peers, "fabric": peers}
    with ExitStack() as ends:
        contenders = {}
        for name, python in pythons.items():
            contenders[name] = Contender(name, python, script, ranks)
            ends.callback(contenders[name].end)
        for contender in contenders.values():
            contender.answers()
        yield contenders


def rounds(contenders: Mapping[str, Contender], case: str, count: int) -> dict[str, list[float]]:
    """Each contender's figures of `count` rounds, in turns, after one that is not counted."""
    figures: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(count + 1):
        for name, contender in contenders.items():
            figure = contender.turn(case)
            if number:
                figures[name].append(figure)
    return figures


def median(figures: Mapping[str, Sequence[float]], name: str) -> float | None:
    return statistics.median(figures[name]) if name in figures else None


def timed(call: Callable[[], object], times: int = 1, clock: Clock = time.perf_counter) -> float:
    """Microseconds of one call out of `times`."""
    started = clock()
    for _ in range(times):
        call()
    return (clock() - started) / times * 1e6


def worked(call: Callable[[], object]) -> float:
    """Microseconds that this process's CPU worked: waiting for its turn on a busy machine is not counted."""
    return timed(call, clock=time.process_time)


def table(rows: Sequence[Row]) -> str:
    """The rows as markdown."""
    lines = ["| what | plain PyTorch | Accelerate | Fabric | accel-core | bar |", "|---|---|---|---|---|---|"]
    for row in rows:
        cells = (_cell(value, row.unit) for value in (row.raw, row.accelerate, row.fabric, row.ours))
        lines.append(f"| {row.what} | {' | '.join(cells)} | {row.bar} |")
    return "\n".join(lines)


def _cell(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    return f"{value:.{2 if abs(value) < 1 else 1}f} {unit}"


def between(page: str, name: str, written: str) -> str:
    """The page with what is written between the marks of this name.

    Raises:
        ValueError: the page does not have the two marks, once each and in their order.
    """
    begin, end = f"<!-- {name}: benchmarks/run.py --write -->\n", f"<!-- /{name} -->\n"
    (before, opened, rest), parts = page.partition(begin), page.count(begin) + page.count(end)
    _, closed, after = rest.partition(end)
    if not (opened and closed and parts == 2):
        raise ValueError(f"README.md lacks the marks {begin.strip()} and {end.strip()}\nput them in again")
    return f"{before}{begin}\n{written.strip()}\n\n{end}{after}"


def within(
    seconds: float, benchmarks: Mapping[str, Callable[[], T]], clock: Clock = time.monotonic
) -> tuple[dict[str, T], list[str]]:
    """What benchmarks give, one after the other; names of those that the time did not suffice to begin."""
    ends, found, left_out = clock() + seconds, {}, []
    for name, measure in benchmarks.items():
        if clock() < ends:
            found[name] = measure()
        else:
            left_out.append(name)
    return found, left_out

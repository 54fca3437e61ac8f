"""The record of a run, as it is read from its file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from attrs import Factory, define, frozen

from accel_core import AccelError

__all__ = ["Record", "Tail", "find", "read"]

FOLDER: Final = "records"
"""In a project's folder."""
MEASURED: Final = ("loss", "lr", "grad_norm", "samples_per_second", "items_per_second", "seconds")
"""Curves of a sample, in the order in which they are shown."""
Line = dict[str, Any]


@frozen
class Point:
    """A value of a curve.

    step: optimizer steps that were done. x: what it is drawn over, the program's own step if it gave one.
    """

    step: int
    x: float
    time: float
    value: float


@define
class Record:
    """A run as it has described itself so far, its restarts joined to one run.

    A run that goes on from a checkpoint does some steps again: what came after the checkpoint gives way.
    name: the project's folder, mostly.
    starts: lines of kind `run`, one for each process that wrote here.
    steps, logs: the samples, and what the program logged.
    events: checkpoints, restarts, warnings, profiles and the like, in order.
    redone: samples and logged lines that gave way. torn: lines that are not whole.
    last: time of the last line.
    """

    path: Path
    name: str = ""
    starts: list[Line] = Factory(list)
    settings: Line = Factory(dict)
    steps: list[Line] = Factory(list)
    logs: list[Line] = Factory(list)
    events: list[Line] = Factory(list)
    redone: int = 0
    torn: int = 0
    last: float = 0.0
    resumed_at: list[tuple[float, int]] = Factory(list)
    """(when, from which step) the run went on."""
    ended: bool = False
    _ends: list[float] = Factory(list)

    @property
    def head(self) -> Line:
        """The last start's line."""
        return self.starts[-1] if self.starts else {}

    @property
    def began(self) -> float:
        """Time of the first line."""
        return float(self.starts[0]["time"]) if self.starts else self.last

    @property
    def done(self) -> int:
        """Optimizer steps that are known to be done."""
        ends = [int(line["step"]) for line in (*self.steps[-1:], *self.logs[-1:], *self.starts[-1:])]
        return max([*ends, *(line["step"] for line in self.events[-1:] if line["kind"] == "end")], default=0)

    def life_ends(self) -> list[float]:
        """Return when each start's process wrote its last line."""
        return [*self._ends, self.last][: len(self.starts)]

    def of(self, kind: str) -> list[Line]:
        """Return the events of this kind."""
        return [line for line in self.events if line["kind"] == kind]

    def add(self, line: Line) -> None:
        """Take the next line of the file."""
        kind, at = line["kind"], float(line["time"])
        if kind != "settings" and not isinstance(line["step"], int):
            raise TypeError(line)
        if kind == "run":
            if self.starts:
                self._ends.append(self.last)
                self._go_on(line)
            self.starts.append(line)
        elif kind == "restart":
            self._go_on(line)
        elif kind == "settings":
            self.settings = line
        elif kind in ("step", "log"):
            (self.steps if kind == "step" else self.logs).append(line)
        if kind not in ("run", "settings", "step", "log"):
            self.events.append(line)
        self.ended, self.last = kind == "end", at

    def _go_on(self, line: Line) -> None:
        self.resumed_at.append((line["time"], line["step"]))
        for lines in (self.steps, self.logs):
            kept = [each for each in lines if each["step"] <= line["step"]]
            self.redone += len(lines) - len(kept)
            lines[:] = kept

    def curves(self) -> dict[str, list[Point]]:
        """Return what can be drawn over the steps: name -> points in order.

        Measured values come first; a sensor is called `device NAME`, and what the program logged
        `logged NAME`.
        """
        found: dict[str, list[Point]] = {}
        for line in self.steps:
            several = {f"loss of {unit}": value for unit, value in line.get("losses", {}).items()}
            sensors = {
                f"device {name}": bool(value) if isinstance(value, list) else value  # reasons, or none
                for name, value in line.get("health", {}).items()
            }
            for name, value in {**{name: line.get(name) for name in MEASURED}, **several, **sensors}.items():
                _put(found, name, line["step"], line, value)
        order = {name: found[name] for name in (*MEASURED, *found) if name in found}
        logged: dict[str, list[Point]] = {}
        for line in self.logs:
            x = line["step"] if line["given"] is None else line["given"]
            for name, value in _flat(line["values"]):
                _put(logged, f"logged {name}", x, line, value)
        return {**order, **logged}

    def memory(self) -> dict[str, list[Point]]:
        """Return memory in bytes over the steps: what -> points in order."""
        found: dict[str, list[Point]] = {}
        for line in self.steps:
            for name, value in line.get("memory", {}).items():
                _put(found, name, line["step"], line, value)
        return found

    def ranks(self) -> list[Line]:
        """Return the pace and memory of ranks as last compared, the slowest first."""
        return next((line["ranks"] for line in reversed(self.steps) if "ranks" in line), [])

    def time_by_phase(self) -> dict[str, float]:
        """Return the seconds of the whole run by what they went to: an estimate.

        A sample stands for the steps since the one before, and for no more time than these took; what is left
        of the time is `between`: starting, evaluating, and all else that is not part of a step.
        """
        spent: dict[str, float] = {}
        begun = [int(line["step"]) for line in (*self.starts, *self.of("restart"))]
        before = 0
        for line in self.steps:
            split, step = line.get("split", {}), line["step"]
            before = max(before, *(at for at in (0, *begun) if at < step))
            weight, own = float(max(1, step - before)), math.fsum(split.values())
            if line.get("seconds") and own:
                weight = min(weight, max(1.0, line["seconds"] * weight / own))
            before = step
            for phase, seconds in split.items():
                if phase != "checkpoint":  # these are counted one by one
                    spent[phase] = spent.get(phase, 0.0) + seconds * weight
        stalls = math.fsum(line.get("seconds") or 0.0 for line in self.of("checkpoint"))
        spent |= {"checkpoint": stalls} if stalls else {}
        lives = zip(self.starts, self.life_ends(), strict=True)
        rest = math.fsum(end - start["time"] for start, end in lives) - math.fsum(spent.values())
        return {**spent, "between": rest} if spent and rest > 0 else spent


class Tail:
    """A record's file, read as far as it is written, as often as one likes."""

    def __init__(self, path: Path) -> None:
        self.record = Record(path, path.resolve().parent.parent.name)
        self._at = 0
        self._rest = b""

    def read(self) -> Record:
        """Add what has come since the last call; a line that is not whole yet waits."""
        with self.record.path.open("rb") as file:
            file.seek(self._at)
            content = file.read()
        self._at += len(content)
        *lines, self._rest = (self._rest + content).split(b"\n")
        for line in filter(bytes.strip, lines):
            self._take(line)
        return self.record

    def end(self) -> Record:
        """Read all of it; a last line that is not whole is counted as torn."""
        self.read()
        if self._rest.strip():
            self._take(self._rest)
            self._rest = b""
        return self.record

    def _take(self, text: bytes) -> None:
        try:
            line = json.loads(text)
            self.record.add(line)
        except (ValueError, KeyError, TypeError):  # cut, by a kill or a full disk
            self.record.torn += 1


def find(run: Path) -> list[Path]:
    """Return the files of records that RUN may mean, the latest last.

    run: such a file, a folder of them, or a project's folder.

    Raises:
        AccelError: there is none.
    """
    if run.is_file():
        return [run]
    for folder in (run / FOLDER, run):
        found = sorted(folder.glob("*.jsonl"), key=lambda path: path.stat().st_mtime)
        records = [path for path in found if folder.name == FOLDER or _begins_as_record(path)]
        if records:
            return records
    raise AccelError(
        f"{run}: no record of a run is there (a folder {FOLDER} with files START-RUN.jsonl)\n"
        "give the project_dir of a run, or a file of its records; record_every=0 turns them off"
    )


def read(runs: Sequence[Path]) -> list[Record]:
    """Return the record that each RUN means: the latest one of a folder.

    Each is called after its project's folder; those of one folder by the file's name too.
    """
    records = [Tail(find(run)[-1]).end() for run in runs]
    for record in records:
        if not record.starts:
            raise AccelError(
                f"{record.path} is not a record of a run: it has no line of kind 'run'\n"
                f"give the project_dir of a run, or a file of its folder {FOLDER}"
            )
        folder = record.path.resolve().parent.parent.name
        alike = [other for other in records if other.path.resolve().parent.parent.name == folder]
        record.name = folder if len(alike) == 1 else f"{folder}/{record.path.stem}"
    names = [record.name for record in records]
    for number, record in enumerate(records, 1):
        if names.count(record.name) > 1:  # of one file, or of copies
            record.name = f"{number}: {record.name}"
    return records


def _begins_as_record(path: Path) -> bool:
    with path.open("rb") as file:
        return b'"kind": "run"' in file.readline()


def _put(found: dict[str, list[Point]], name: str, x: float, line: Line, value: Any) -> None:
    number = _number(value)
    if number is not None:
        found.setdefault(name, []).append(Point(line["step"], x, line["time"], number))


def _number(value: Any) -> float | None:
    if isinstance(value, str) and value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    try:
        return float(value) if isinstance(value, (int, float)) else None
    except OverflowError:  # an integer beyond all floats
        return math.inf if value > 0 else -math.inf


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value

"""The record of a run, as it is read from its file."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from attrs import Factory, define

from accel_core import AccelError
from accel_monitor.columns import Curve, Curves, flat

__all__ = ["Record", "Tail", "find", "not_a_record", "read"]

FOLDER: Final = "records"
"""In a project's folder."""
MEASURED: Final = ("seconds", "samples_per_second", "items_per_second", "lr")
"""Curves of a sample, in the order in which they are shown."""
LOGGED: Final = "logged "
"""Before the names of values that the program logged."""
CHUNK_BYTES: Final = 1 << 24
Line = dict[str, Any]


@define
class Record:
    """A run as it has described itself so far, its restarts joined to one run.

    A run that goes on from a checkpoint does some steps again: what came after the checkpoint gives way.
    name: the project's folder, mostly.
    starts: lines of kind `run`, one for each process that wrote here.
    sample: the last sample. seconds: of a step, as last sampled.
    events: checkpoints, restarts, warnings, profiles and the like, in order.
    ranks: pace and memory of ranks as last compared, the slowest first.
    done: optimizer steps that are known to be done.
    redone: samples and logged lines that gave way. torn: lines that are not whole.
    last: time of the last line. shift: seconds that are added to its clock, which had gone back.
    set_back: the most that were added to any.
    """

    path: Path
    name: str = ""
    starts: list[Line] = Factory(list)
    settings: Line = Factory(dict)
    sample: Line = Factory(dict)
    seconds: float | None = None
    memory: Curves = Factory(Curves)
    events: list[Line] = Factory(list)
    ranks: list[Line] = Factory(list)
    done: int = 0
    redone: int = 0
    torn: int = 0
    last: float = 0.0
    shift: float = 0.0
    set_back: float = 0.0
    resumed_at: list[tuple[float, int]] = Factory(list)
    """(when, from which step) the run went on."""
    ended: bool = False
    _ends: list[float] = Factory(list)
    _measured: Curves = Factory(Curves)
    _logged: Curves = Factory(Curves)
    _lines: array[float] = Factory(lambda: array("d"))
    """Steps of samples and logged lines."""
    _warnings: dict[str, Line] = Factory(dict)
    _spent: dict[str, float] = Factory(dict)
    _sampled: int = 0
    """The step up to which samples stand for all."""

    @property
    def head(self) -> Line:
        """The last start's line."""
        return self.starts[-1] if self.starts else {}

    @property
    def began(self) -> float:
        """Time of the first line."""
        return float(self.starts[0]["time"]) if self.starts else self.last

    def life_ends(self) -> list[float]:
        """Return when each start's process wrote its last line."""
        return [*self._ends, self.last][: len(self.starts)]

    def of(self, kind: str) -> list[Line]:
        """Return the events of this kind."""
        return [line for line in self.events if line["kind"] == kind]

    def add(self, line: Line) -> None:
        """Take the next line of the file."""
        kind = line["kind"]
        if kind != "settings" and not isinstance(line["step"], int):
            raise TypeError(line)
        line["time"] = self._time(float(line["time"]), is_start=kind == "run")
        if kind == "run":
            self._start(line)
        elif kind == "restart":
            self._go_on(line)
        elif kind == "settings":
            self.settings = line
        elif kind == "step":
            self._add_sample(line)
        elif kind == "log":
            self._add_logged(line)
        elif kind == "warning":
            self._warn(line)
        if kind not in ("run", "settings", "step", "log", "warning"):
            self.events.append(line)
        if kind in ("run", "restart", "step", "log", "end"):
            self.done = line["step"]
        self.ended, self.last = kind == "end", line["time"]

    def _warn(self, line: Line) -> None:
        """Take a warning; of one text there is one event.

        It has a count, `times`, and the last line, `until`.
        """
        if (first := self._warnings.get(line["text"])) is None:
            first = self._warnings[line["text"]] = line | {"times": 0}
            self.events.append(first)
        first["times"], first["until"] = first["times"] + 1, line

    def _time(self, told: float, *, is_start: bool) -> float:
        """Return the time of a line, which is not before that of the line before it.

        The clock may have been set, or be that of another machine.
        """
        self.shift = max(0.0 if is_start else self.shift, self.last - told if self.starts else 0.0)
        self.set_back = max(self.set_back, self.shift)
        return told + self.shift

    def _start(self, line: Line) -> None:
        if self.starts:
            self._ends.append(self.last)
            self._go_on(line)
        self.starts.append(line)
        self._sampled, self.ranks = line["step"], []

    def _go_on(self, line: Line) -> None:
        step = line["step"]
        self.resumed_at.append((line["time"], step))
        for curves in (self._measured, self._logged, self.memory):
            curves.cut(step)
        kept = array("d", (each for each in self._lines if each <= step))
        self.redone += len(self._lines) - len(kept)
        self._lines, self._sampled, self.sample = kept, step, {}

    def _add_logged(self, line: Line) -> None:
        self._lines.append(line["step"])
        for name, value in flat(line["values"]):
            self._logged.put(f"{LOGGED}{name}", line, line["given"], value)

    def _add_sample(self, line: Line) -> None:
        step, split, seconds = line["step"], line.get("split", {}), line.get("seconds")
        sensors = {
            f"device {name}": bool(value) if isinstance(value, list) else value  # reasons, or none
            for name, value in line.get("health", {}).items()
        }
        for name, value in {**{name: line.get(name) for name in MEASURED}, **sensors}.items():
            self._measured.put(name, line, step, value)
        for name, value in line.get("memory", {}).items():
            self.memory.put(name, line, step, value)
        weight, own = float(max(1, step - self._sampled)), math.fsum(split.values())
        if seconds and own:
            weight = min(weight, max(1.0, seconds * weight / own))
        for phase, spent in split.items():
            if phase != "checkpoint":  # these are counted one by one
                self._spent[phase] = self._spent.get(phase, 0.0) + spent * weight
        self.sample, self._sampled = line, step
        self._lines.append(step)
        self.seconds, self.ranks = seconds or self.seconds, line.get("ranks", self.ranks)

    def curves(self) -> dict[str, Curve]:
        """Return what can be drawn over the steps, by name.

        What the program logged comes first, as `logged NAME`, losses before other values. Values of samples
        follow; a sensor of the device is called `device NAME`.
        """
        return {**self.logged(), **self.sampled()}

    def logged(self) -> dict[str, Curve]:
        """Return the curves that the program logged, losses first."""
        return dict(sorted(self._logged.items(), key=lambda item: "loss" not in item[0].lower()))

    def sampled(self) -> dict[str, Curve]:
        """Return the curves of samples, which only some steps have."""
        names = [name for name in (*MEASURED, *self._measured) if name in self._measured]
        return {name: self._measured[name] for name in names}

    def time_by_phase(self) -> dict[str, float]:
        """Return the seconds of the whole run by what they went to: an estimate.

        A sample stands for the steps since the one before, and for no more time than these took; what is left
        of the time is `between`: starting, evaluating, and all else that is not part of a step.
        """
        stalls = math.fsum(line.get("seconds") or 0.0 for line in self.of("checkpoint"))
        spent = self._spent | ({"checkpoint": stalls} if stalls else {})
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
            while content := file.read(CHUNK_BYTES):
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
        except (AttributeError, LookupError, RecursionError, TypeError, ValueError):  # cut, as by a kill
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
        "give the project_dir of a run, or a file of its records; monitor.every=0 turns them off"
    )


def read(runs: Sequence[Path]) -> list[Record]:
    """Return the record that each RUN means: the latest one of a folder.

    Each is called after its project's folder; those of one folder by the file's name too.
    """
    records = [Tail(find(run)[-1]).end() for run in runs]
    for record in records:
        if not record.starts:
            raise not_a_record(record.path)
        folder = record.path.resolve().parent.parent.name
        alike = [other for other in records if other.path.resolve().parent.parent.name == folder]
        record.name = folder if len(alike) == 1 else f"{folder}/{record.path.stem}"
    names = [record.name for record in records]
    for number, record in enumerate(records, 1):
        if names.count(record.name) > 1:  # of one file, or of copies
            record.name = f"{number}: {record.name}"
    return records


def not_a_record(path: Path) -> AccelError:
    """Return the error for a file that another program has written."""
    return AccelError(
        f"{path} is not a record of a run: it has no line of kind 'run'\n"
        f"give the project_dir of a run, or a file of its folder {FOLDER}"
    )


def _begins_as_record(path: Path) -> bool:
    with path.open("rb") as file:
        return b'"kind": "run"' in file.readline()

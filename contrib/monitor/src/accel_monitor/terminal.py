"""Blocks of text and small curves of a record, for a terminal."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from accel_monitor.columns import Curve
from accel_monitor.curve import braille, over_steps, spark
from accel_monitor.facts import (
    about,
    differences,
    duration,
    folder_of,
    memory_text,
    notes,
    paces,
    rate,
    title,
)
from accel_monitor.records import Record

__all__ = [
    "console",
    "events",
    "lines",
    "loss_of",
    "losses",
    "memory",
    "printable",
    "ranks",
    "shares",
    "sparks",
    "state",
    "summary",
]

PIPE_WIDTH: Final = 80
MARGIN: Final = 10
"""Columns of a curve's scale."""


def console() -> Console:
    """Return the console of this process's output: 80 columns in a pipe."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    return Console(highlight=False, width=None if is_terminal else PIPE_WIDTH)


def summary(records: Sequence[Record], width: int) -> RenderableType:
    """Return what `accel report` prints."""
    parts: list[RenderableType] = []
    for record in records:
        parts += [Rule(Text(printable(record.name), "bold"), align="left")]
        parts += [lines(about([record])), losses(record, width, 8), sparks(record, width, 20)]
        parts += [time_by_phase(record, width), memory(record), ranks(record, 8)]
        parts += [events(record, 8)]
        parts += [Text(printable(note), "yellow") for note in notes(record)]
    found = differences(records)
    if found:
        parts += [Rule(Text("differences of settings", "bold"), align="left")]
        parts.append(lines(found, ["", *(record.name for record in records)]))
    return Group(*parts)


def lines(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> RenderableType:
    """Return rows as a table without borders: a name, and its values."""
    grid = Table(box=None, show_header=bool(head), padding=(0, 2, 0, 0), pad_edge=False)
    rows = list(rows)
    for at in range(len(rows[0]) if rows else 0):
        grid.add_column(Text(head[at]) if head else "", style="cyan" if at == 0 else "", overflow="fold")
    for row in rows:
        grid.add_row(*(Text(printable(cell)) for cell in row))
    return grid


def printable(text: str) -> str:
    """Return a text of a record; what would move the cursor is an escape."""
    return "".join(
        one if one.isprintable() or one == "\n" else one.encode("unicode_escape").decode() for one in text
    )


def loss_of(record: Record) -> tuple[str, Curve | None]:
    """Return the loss and its name; without a loss the first curve, if there is any."""
    return next(iter(record.curves().items()), ("", None))


def losses(record: Record, width: int, height: int) -> RenderableType:
    """Return the loss as a curve with its scale."""
    name, points = loss_of(record)
    if points is None:
        return Text("no loss is recorded yet", "dim")
    values = points.values
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        said = f"{printable(title(name))}: {values[-1]}, and none of its {len(values)} values is finite"
        return Text(said, "yellow")
    columns = max(8, width - MARGIN - 1)
    drawn = over_steps(points, 2 * columns)
    scale = [f"{max(drawn):.4g}", *[""] * (height - 2), f"{min(drawn):.4g}"]
    steps = f"steps {points[0].x:.12g} to {points[-1].x:.12g}"
    text = Text(f"{printable(title(name))}: {values[0]:.4g} -> {values[-1]:.4g}, {steps}\n")
    for label, line in zip(scale, braille(drawn, height), strict=True):
        text.append(f"{label:>{MARGIN}} ", "dim").append(f"{line}\n", "blue")
    return text


def sparks(record: Record, width: int, most: int) -> RenderableType:
    """Return a small curve of each value beside the loss, with its last one.

    most: of the other values that the program logged, which come first.
    """
    loss, _ = loss_of(record)
    logged = [item for item in record.logged().items() if item[0] != loss][:most]
    shown = [*logged, *((name, curve) for name, curve in record.sampled().items() if name != loss)]
    bars = max(8, width - 36)
    return lines([(title(name), spark(curve, bars), _short(name, curve)) for name, curve in shown])


def _short(name: str, points: Curve) -> str:
    last = points[-1].value
    if name == "seconds":
        return f"{last:.4g} s"
    return rate(last) if name.endswith("_per_second") else f"{last:.4g}"


def time_by_phase(record: Record, width: int) -> RenderableType:
    """Return where the time went: a bar for each phase."""
    spent = record.time_by_phase()
    total, longest = math.fsum(spent.values()), max(spent.values(), default=0.0)
    bars = max(8, width - 40)
    return lines(
        (
            phase.replace("_", " and "),
            "█" * round(bars * seconds / longest),
            duration(seconds),
            f"{seconds / total:.0%}",
        )
        for phase, seconds in sorted(spent.items(), key=lambda item: -item[1])
    )


def shares(record: Record) -> str:
    """Return where the time went, in a line."""
    spent = record.time_by_phase()
    total = math.fsum(spent.values())
    parts = (
        f"{phase.replace('_', ' and ')} {seconds / total:.0%}"
        for phase, seconds in sorted(spent.items(), key=lambda item: -item[1])
        if seconds >= total / 200
    )
    return f"time: {', '.join(parts)}" if spent else ""


def memory(record: Record) -> RenderableType:
    """Return the memory of the main process and its device: last, and most."""
    rows = [
        (name, memory_text(points[-1].value), f"most {memory_text(max(points.values))}")
        for name, points in record.memory.items()
    ]
    return lines([(f"memory: {name}", *rest) for name, *rest in rows])


def ranks(record: Record, most: int) -> RenderableType:
    """Return the slowest ranks: own time of a step, and memory."""
    head, *rows = paces(record) or [()]
    return lines(rows[:most], head)


def events(record: Record, most: int) -> RenderableType:
    """Return the last checkpoints, restarts and warnings."""
    return lines(list(_events(record))[-most:])


def _events(record: Record) -> Iterator[tuple[str, str]]:
    found = [(at, f"goes on from step {step}") for at, step in record.resumed_at]
    for line in record.events:
        if line["kind"] == "checkpoint":
            waited = "" if line["seconds"] is None else f", {line['seconds']:.2g} s"
            found.append(
                (line["time"], f"checkpoint of step {line['step']}: {folder_of(line, record)}{waited}")
            )
        elif line["kind"] == "warning":
            again = f" ({line['times']} times, first at step {line['step']})" if line["times"] > 1 else ""
            found.append((line["until"]["time"], f"warning: {line['text']}{again}"))
        elif line["kind"] == "profile":
            found.append((line["time"], f"profile: {line['path']}"))
    for at, text in sorted(found):
        yield time.strftime("%H:%M:%S", time.localtime(at)), text


def state(record: Record, now: float) -> str:
    """Return whether the run goes on: ended, or when it last wrote."""
    if not record.starts:
        return "has written nothing yet"
    if record.ended:
        return f"ended after {duration(record.last - record.began)}"
    now += record.shift
    silent = now - record.last
    return f"runs for {duration(now - record.began)}" + (
        f", nothing new for {duration(silent)}" if silent > 60 else ""
    )

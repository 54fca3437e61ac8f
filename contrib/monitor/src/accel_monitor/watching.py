"""A run while it trains, on one screen."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

import click
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from accel_core import AccelError
from accel_monitor.facts import duration, rate, title
from accel_monitor.records import Record, Tail, find, not_a_record
from accel_monitor.terminal import (
    console,
    events,
    loss_of,
    losses,
    memory,
    printable,
    ranks,
    shares,
    sparks,
    state,
)

__all__ = ["frame", "line", "watch_run"]

LOOK_SECONDS: Final = 1.0
LINE_SECONDS: Final = 60.0
"""Between two lines where there is no terminal."""


def watch_run(run: Path, *, steps: int | None, once: bool) -> None:
    """Show the run until it ends, or Ctrl-C.

    Without a terminal it is a line per minute.
    steps: that it will do in all, if the caller knows. once: one screen, and no waiting.
    """
    screen = console()
    try:
        tail = Newest(run, once=once)
        if once:
            screen.print(frame(tail.read(), screen.width, screen.height, steps))
        elif screen.is_terminal:
            with Live(console=screen, screen=True, auto_refresh=False) as live:
                while not tail.read().ended:
                    live.update(frame(tail.record, screen.width, screen.height, steps), refresh=True)
                    time.sleep(LOOK_SECONDS)
            screen.print(frame(tail.record, screen.width, screen.height, steps))
        else:
            _lines(tail, steps)
    except KeyboardInterrupt:
        return


class Newest:
    """The run's latest record; one that begins later takes its place."""

    def __init__(self, run: Path, *, once: bool) -> None:
        self._run, self._tail = run, Tail(_found(run, once=once))

    @property
    def record(self) -> Record:
        return self._tail.record

    def read(self) -> Record:
        """Add what has come since the last call.

        Raises:
            AccelError: the file is not a record.
        """
        latest = find(self._run)[-1]
        if latest.name > self.record.path.name:  # names begin with the time of the start
            self._tail = Tail(latest)
        record = self._tail.read()
        if record.torn and not record.starts:  # a record's first line says what the run is
            raise not_a_record(record.path)
        return record


def _lines(tail: Newest, steps: int | None) -> None:
    told = -LINE_SECONDS
    while True:
        ended, now = tail.read().ended, time.monotonic()
        if ended or now - told >= LINE_SECONDS:
            click.echo(line(tail.record, steps))
            told = now
        if ended:
            return
        time.sleep(LOOK_SECONDS)


def _found(run: Path, *, once: bool) -> Path:
    """Return the latest record of a run; a folder without one is waited for."""
    waits = False
    while True:
        try:
            return find(run)[-1]
        except AccelError:
            if once or not run.is_dir():
                raise
        if not waits:
            click.echo(f"{run} has no record yet; waiting", err=True)
            waits = True
        time.sleep(LOOK_SECONDS)


def frame(record: Record, width: int, height: int, steps: int | None) -> RenderableType:
    """Return the screen."""
    head = Text(printable(record.name), "bold").append(f"  {state(record, time.time())}", "not bold")
    place = record.head
    where = Text(printable(f"{(place.get('explain') or [''])[0]}, {place.get('host', '')}"), "dim")
    curve_height = max(3, min(12, height - 20))
    return Group(
        head,
        where,
        _progress(record, width, steps),
        losses(record, width, curve_height),
        sparks(record, width, 3),
        Text(shares(record)),
        memory(record),
        ranks(record, 4),
        events(record, 5),
    )


def line(record: Record, steps: int | None) -> str:
    """Return the state of the run in one line."""
    name, points = loss_of(record)
    parts = [time.strftime("%H:%M:%S", time.localtime(record.last - record.shift)), _place(record, steps)]
    parts += [f"{title(name)} {points[-1].value:.4g}"] if points is not None else []
    for name in ("samples_per_second", "items_per_second"):
        values = record.curves().get(name)
        parts += [f"{rate(values[-1].value)} {title(name)}"] if values else []
    saved = record.of("checkpoint")
    parts += [f"checkpoint of step {saved[-1]['step']}"] if saved else []
    return printable(", ".join([*parts, state(record, time.time())]))


def _place(record: Record, steps: int | None) -> str:
    return f"step {record.done}" + (f" of {steps}" if steps else "")


def _progress(record: Record, width: int, steps: int | None) -> RenderableType:
    """Return bars of the steps, if their number is known, and of the epoch's batches."""
    grid = Table.grid(padding=(0, 1))
    bar_width, seconds = max(10, width - 50), None if record.ended else record.seconds
    if steps:
        left = _left(steps - record.done, seconds)
        grid.add_row(_place(record, steps), ProgressBar(steps, record.done, width=bar_width), left)
    else:
        grid.add_row(_place(record, None))
    last = record.sample
    if last.get("batches"):
        options = {path: value for path, value, _ in record.head.get("config", [])}
        size = options.get("gradient_accumulation_steps") or 1
        text = f"epoch {last['epoch'] + 1}: {last['batch']} of {last['batches']} batches"
        left = _left((last["batches"] - last["batch"]) / size, seconds)
        grid.add_row(text, ProgressBar(last["batches"], last["batch"], width=bar_width), left)
    return grid


def _left(steps: float, seconds: float | None) -> str:
    return "" if seconds is None or steps <= 0 else f"{duration(steps * seconds)} left"

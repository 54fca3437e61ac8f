"""One page about runs, in one file that needs no network."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any, Final

from accel_monitor.columns import Curve
from accel_monitor.facts import about, differences, notes, paces, title, traces
from accel_monitor.pictures import mesh_picture, schedule_picture
from accel_monitor.records import Record

__all__ = ["page"]

MOST_POINTS: Final = 4000
"""Of one curve; a longer one keeps the extremes of each stretch."""
MOST_WARNINGS: Final = 200
"""In the table, and on the time axis."""
GIB: Final = 1 << 30


def page(records: Sequence[Record]) -> str:
    """Return the page as HTML, with plotly.js and all data in it."""
    from plotly.offline import get_plotlyjs

    names = ", ".join(record.name for record in records)
    data = json.dumps([_run(record) for record in records], allow_nan=False)
    return Template(_file("page.html")).substitute(
        title=escape(names if len(names) < 80 else f"{len(records)} runs"),
        style=_file("page.css"),
        body="\n".join(_body(records)),
        runs=data.replace("<", "\\u003c"),  # a text in it may not end the script
        plotly=get_plotlyjs(),
        script=_file("page.js"),
    )


def _file(name: str) -> str:
    return (files("accel_monitor") / "page" / name).read_text("utf-8")


# -- the data of the curves ---------------------------------------------------------------------------


def _run(record: Record) -> dict[str, Any]:
    began = record.began
    starts = [float(start["time"]) for start in record.starts]
    return {
        "name": record.name,
        "seconds": record.last - began,
        "curves": {name: _curve(curve, began) for name, curve in record.curves().items()},
        "memory": {name: _curve(curve, began, GIB) for name, curve in record.memory.items()},
        "phases": record.time_by_phase(),
        "marks": [*_marks(record)],
        "lives": [
            [start - began, end - began] for start, end in zip(starts, record.life_ends(), strict=True)
        ],
    }


def _curve(curve: Curve, began: float, unit: int = 1) -> dict[str, Any]:
    places = [*_thinned(curve.values)]
    kept = [curve[at] for at, _ in places]
    means = {"means": [mean / unit if math.isfinite(mean) else None for _, mean in places]}
    return {
        **(means if len(kept) < len(curve) else {}),
        "x": [point.x for point in kept],
        "y": [point.value / unit if math.isfinite(point.value) else None for point in kept],
        "t": [round(point.time - began, 3) for point in kept],
        "own": any(point.x != point.step for point in kept),
    }


def _thinned(values: Sequence[float]) -> Iterator[tuple[int, float]]:
    """Yield the places of at most MOST_POINTS values, peaks and troughs among them.

    With each comes the mean of the finite values of its stretch, which smoothing goes by.
    """
    stretch = 1 if len(values) <= MOST_POINTS else math.ceil(3 * len(values) / MOST_POINTS)
    for begin in range(0, len(values), stretch):
        part = range(begin, min(begin + stretch, len(values)))
        odd = [at for at in part if not math.isfinite(values[at])]
        ends = sorted((at for at in part if math.isfinite(values[at])), key=values.__getitem__)
        mean = sum(values[at] for at in ends) / len(ends) if ends else math.nan
        yield from ((at, mean) for at in sorted({*ends[:1], *ends[-1:], *odd[:1]}))


def _marks(record: Record) -> Iterator[dict[str, Any]]:
    for start in record.starts[1:]:
        text = f"goes on from step {start['step']} in another process"
        yield _mark("restart", start, record, text)
    more = {id(line) for line in record.of("warning")[MOST_WARNINGS:]}
    for line in (line for line in record.events if id(line) not in more):
        texts = {
            "checkpoint": f"checkpoint of step {line.get('step')}: {line.get('folder')}",
            "restart": f"a state of step {line.get('step')} was loaded",
            "warning": str(line.get("text")),
            "profile": f"profile: {line.get('path')}",
            "end": "the end",
        }
        if line["kind"] in texts:
            yield _mark(line["kind"], line, record, texts[line["kind"]])


def _mark(kind: str, line: dict[str, Any], record: Record, text: str) -> dict[str, Any]:
    shown = escape(text if len(text) < 120 else f"{text[:117]}...")
    return {"kind": kind, "step": line.get("step"), "t": line["time"] - record.began, "text": shown}


# -- what stands around them --------------------------------------------------------------------------


def _body(records: Sequence[Record]) -> Iterator[str]:
    yield from (f'<p class="note">{escape(note)}</p>' for record in records for note in notes(record))
    logged = {name: None for record in records for name in record.logged()}
    if logged:
        yield '<section class="charts" id="logged">'
        yield from (_chart(title(name), "curves", name) for name in logged)
        yield "</section>"
    yield from _samples(records)
    yield "<h2>Where the time went</h2>"
    yield '<p class="note">An estimate from the samples. "between" is all that belongs to no step: starting,'
    yield " evaluating, saving in other ways.</p>"
    yield '<section class="charts">' + _chart("by phase", "phases", wide=True)
    yield _chart("checkpoints ◆, restarts ▶, warnings ▲, profiles ■", "timeline", wide=True) + "</section>"
    yield "<h2>What ran</h2>"
    yield _table(["", *(record.name for record in records)], about(records))
    yield from _differences(records)
    for record in records:
        yield from _details(record, "" if len(records) == 1 else f" of {record.name}")


def _samples(records: Sequence[Record]) -> Iterator[str]:
    sampled = {name: None for record in records for name in record.sampled()}
    has_memory = any(record.memory for record in records)
    if sampled or has_memory:
        yield '<h2>Samples</h2><p class="note">Of some steps only (option monitor.every); memory is that of'
        yield ' the main process and its device.</p><section class="charts" id="samples">'
        yield from (_chart(title(name), "curves", name) for name in sampled)
        yield _chart("memory", "memory") * has_memory + "</section>"


def _differences(records: Sequence[Record]) -> Iterator[str]:
    if len(records) < 2:
        return
    yield "<h2>Differences of settings</h2>"
    found = differences(records)
    if found:
        yield _table(["", *(record.name for record in records)], found)
    else:
        yield '<p class="note">None: options and settings are the same.</p>'


def _details(record: Record, which: str) -> Iterator[str]:
    mesh = mesh_picture(record.head)
    if mesh:
        yield f"<h2>Processes{escape(which)}</h2>{mesh}"
    ranks = paces(record)
    if ranks:
        yield f"<h2>Ranks, as last compared{escape(which)}</h2>"
        yield '<p class="note">The slowest first. Own time is that of a step until its last backward, without'
        yield " backwards, and in its optimizer; a rank is slow while the others wait for it.</p>" + _table(
            ranks[0], ranks[1:]
        )
    schedule = schedule_picture(record.head)
    if schedule:
        yield f"<h2>Pipeline schedule{escape(which)}</h2>{schedule}"
    if record.of("warning"):
        yield f"<h2>Warnings{escape(which)}</h2>"
        found = record.of("warning")
        yield _table(["", ""], [(_place(line), str(line["text"])) for line in found[:MOST_WARNINGS]])
        if len(found) > MOST_WARNINGS:
            more = len(found) - MOST_WARNINGS
            yield f'<p class="note">{more} later texts of warnings are in the record alone.</p>'
    if record.of("profile"):
        yield f"<h2>Profiler traces{escape(which)}</h2>"
        yield '<p class="note">Open them in chrome://tracing, or in Perfetto.</p><ul>'
        yield from (f'<li><a href="{escape(link)}">{escape(path)}</a></li>' for path, link in traces(record))
        yield "</ul>"
    options = [(path, f"{value}", f"{origin}") for path, value, origin in record.head.get("config", [])]
    yield f"<h2>Details{escape(which)}</h2><details><summary>Why this stack: explain()</summary><pre>"
    yield escape("\n".join(record.head.get("explain", []))) + "</pre></details>"
    yield "<details><summary>All options, with origins</summary>"
    yield _table(["option", "value", "from"], options) + "</details>"


def _place(warning: Mapping[str, Any]) -> str:
    first, last, times = warning["step"], warning["until"]["step"], warning["times"]
    return f"step {first}" if times == 1 else f"steps {first} to {last}, {times} times"


def _chart(heading: str, group: str, name: str = "", *, wide: bool = False) -> str:
    chosen = f' data-name="{escape(name)}"' if name else ""
    plot = f'<div class="plot" data-group="{group}"{chosen}></div>'
    return f'<div class="card{" wide" * wide}"><h3>{escape(heading)}</h3>{plot}</div>'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head) if any(head) else ""
    body = "".join(
        f"<tr><th>{escape(row[0])}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in row[1:])}</tr>"
        for row in rows
    )
    return f'<div class="table"><table><tr>{top}</tr>{body}</table></div>'

"""Facts of runs in words, notes on their curves, and differences between them."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accel_monitor.columns import Curve
from accel_monitor.records import LOGGED, Record

__all__ = [
    "about",
    "differences",
    "duration",
    "folder_of",
    "memory_text",
    "notes",
    "paces",
    "rate",
    "title",
    "traces",
]

CLOCK_SECONDS = 1.0
"""Least seconds of a clock's setting back that are told."""
TITLES = {
    "seconds": "step time",
    "samples_per_second": "samples/s",
    "items_per_second": "tokens/s",
    "lr": "learning rate",
}
"""Of curves of samples; items are mostly tokens."""
UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def title(name: str) -> str:
    """Return the title of a curve."""
    return TITLES.get(name, name.removeprefix(LOGGED))


def about(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """Return rows of facts: what, and its value in each run."""
    columns = [_about(record) for record in records]
    names = {name: None for column in columns for name in column}
    return [(name, *(column.get(name, "-") for column in columns)) for name in names]


def _about(record: Record) -> dict[str, str]:
    head = record.head
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.began))
    memory = {name: max(curve.values) for name, curve in record.memory.items()}
    rows = {
        "run": head.get("run"),
        "script": head.get("script"),
        "started": started,
        "took": duration(record.last - record.began) + ("" if record.ended else ", has not ended"),
        "steps": f"{record.done}",
        "starts": f"{len(record.starts)}",
        **_of_starts(record.starts),
        "most memory": ", ".join(f"{memory_text(value)} {name}" for name, value in memory.items()),
        "checkpoints": f"{len(record.of('checkpoint'))}",
    }
    return {name: str(value) for name, value in rows.items() if value}


def _of_starts(starts: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return facts that starts of one run may not share, in their order."""
    found: dict[str, dict[str, None]] = {}
    for head in starts:
        each = {
            "stack": (head.get("explain") or [""])[0],
            "processes": f"{head.get('processes')} on {head.get('host')}",
            "device": " ".join(dict.fromkeys(f"{value}" for value in head.get("device", {}).values())),
            "commit": head.get("git") or "not in a git repository",
            "versions": _versions(head.get("versions", {})),
        }
        for name, value in each.items():
            found.setdefault(name, {})[value] = None
    return {name: ", then ".join(filter(None, values)) for name, values in found.items()}


def _versions(told: Mapping[str, str]) -> str:
    """Return the versions, and the distribution of several plugins once."""
    return ", ".join(dict.fromkeys(v if " " in v else f"{name} {v}" for name, v in told.items()))


def paces(record: Record) -> list[tuple[str, ...]]:
    """Return a head, and a row for each rank of the last comparison, or [].

    The slowest rank comes first. Own time is that until a step's last backward, without backwards, and in
    its optimizer.
    """
    found = record.ranks
    if not found:
        return []
    kinds = list(dict.fromkeys(kind for each in found for kind in each["memory"]))
    rows = [
        (
            f"{each['rank']}",
            each["host"],
            f"{each['own']:.3g} s{' slow' if each['slow'] else ''}",
            f"{each['data']:.3g} s",
            *(memory_text(each["memory"][kind]) if kind in each["memory"] else "-" for kind in kinds),
        )
        for each in found
    ]
    return [("rank", "host", "own time", "data", *kinds), *rows]


def notes(record: Record) -> list[str]:
    """Return what one must know to read the curves rightly."""
    found = []
    if record.torn:
        found.append(f"{record.name}: {record.torn} line(s) of the record are cut, and left out.")
    if record.redone:
        steps = ", ".join(str(step) for _, step in record.resumed_at)
        found.append(
            f"{record.name} went on from step {steps}: {record.redone} line(s) of steps that were done"
            " again gave way to the later ones."
        )
    if record.set_back > CLOCK_SECONDS:
        found.append(
            f"{record.name}: a clock went back by {duration(record.set_back)}, which are added to the times"
            " after it."
        )
    odd = [text for name, curve in record.curves().items() if (text := _not_finite(name, curve))]
    if odd:
        found.append(f"{record.name}: values that are not finite are gaps in the curves: {'; '.join(odd)}.")
    return found


def _not_finite(name: str, curve: Curve) -> str:
    odd = [at for at, value in enumerate(curve.values) if not math.isfinite(value)]
    return f"{len(odd)} of {title(name)}, the first at step {curve.xs[odd[0]]:.12g}" if odd else ""


def differences(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """Return options and settings that are not the same in all runs."""
    columns = [_settings(record) for record in records]
    names = sorted({name for column in columns for name in column})
    rows = [(name, *(column.get(name, "-") for column in columns)) for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]


def _settings(record: Record) -> dict[str, str]:
    head = record.head
    found = {path: _text(value) for path, value, _ in head.get("config", [])}
    found |= {f"settings.{name}": _text(value) for name, value in record.settings.get("values", {}).items()}
    found |= {f"versions.{name}": str(version) for name, version in head.get("versions", {}).items()}
    facts = {"commit": head.get("git"), "processes": head.get("processes"), "mesh": head.get("mesh")}
    return {**found, **{name: _text(value) for name, value in {**facts, **_device(head)}.items()}}


def _device(head: Mapping[str, Any]) -> dict[str, Any]:
    return {f"device.{name}": value for name, value in head.get("device", {}).items()}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def folder_of(line: Mapping[str, Any], record: Record) -> str:
    """Return a checkpoint's folder, within the project's folder if it is there."""
    folder, project = Path(str(line["folder"])), Path(record.path).resolve().parent.parent
    return str(folder.relative_to(project) if folder.is_relative_to(project) else folder)


def traces(record: Record) -> list[tuple[str, str]]:
    """Return (path, link) of each profiler trace."""
    paths = dict.fromkeys(str(line["path"]) for line in record.of("profile"))
    return [(path, Path(path).absolute().as_uri()) for path in paths]


def duration(seconds: float) -> str:
    """Return a time in words, such as 2 h 05 min."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 60} min {whole % 60:02} s" if whole >= 60 else f"{seconds:.1f} s"


def memory_text(size: float) -> str:
    """Return bytes in a unit that suits them."""
    for unit, word in UNITS:
        if size >= unit:
            return f"{size / unit:.1f} {word}"
    return f"{size:.0f} B"


def rate(value: float) -> str:
    """Return a rate in few digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"

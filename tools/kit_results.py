"""Write the conformance kit's results into docs/tested.md: stack by level, real or simulated.

With `ACCEL_KIT_REPORTS=FOLDER pytest backends`, each run of the kit leaves its report in FOLDER.
`python tools/kit_results.py FOLDER` updates the rows of these reports and keeps the others.
`--check` compares the table with the reports. Imports no torch.
"""
# ruff: noqa: INP001, T201  # a script

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from accel_core.plugins.catalog import catalog_entries

PAGE = Path(__file__).resolve().parent.parent / "docs" / "tested.md"
LEVELS = ("packaging", "device", "training", "processes", "checkpoints")
HEAD = f"| stack | at once | {' | '.join(LEVELS)} |\n|---|---|{'---|' * len(LEVELS)}\n"
KNOWN = re.compile(r", (\d+) known to fail$")
TABLE = re.compile(re.escape(HEAD) + r"((?:\|.*\n)*)")
NOT_RUN = (
    ("* + deepspeed", LEVELS, "needs the vendor library"),
    ("xla*", ("processes",), "XLA's CPU device serves one process"),
    ("[!m]*, ?p *", LEVELS[:3], "needs more than one process"),
    ("[!m]*, dp_replicate *", LEVELS[:3], "needs more than one process"),
    ("*, *", LEVELS[:2], "same as without options"),
    ("megatron + fp8-te, *", ("training",), "no loop by hand has megatron-core's float8 layers"),
    ("megatron, ?p *", ("training",), "its ranks hold different parts of a model"),
    ("megatron, ?p *", LEVELS[3:], "tested with both sizes"),
    ("* + *", ("packaging", "device", "checkpoints"), "its parts are tested alone"),
)
"""(stacks, levels, why): checks that the kit leaves out. The first row that fits counts."""
ONLY_NAMED = ("cuda, hpu, npu, xpu + deepspeed",)
"""Rows without a result, for stacks that readers will look for."""

STOOD_IN = frozenset({"fp8-te"})
"""Plugins whose vendor library computes by a stand-in here."""

Row = dict[str, str]


def reported(files: Iterable[Path]) -> dict[str, Row]:
    """Read the results of each stack, for this repository's devices and strategies."""
    ours = {"accel-core", *(plugin.distribution for plugin in catalog_entries())}
    found: dict[str, Row] = {}
    for file in files:
        report = json.loads(file.read_text(encoding="utf-8"))
        if "drawn" in report or not report.get("complete", True):  # a part of a level is not a result
            continue
        names = {each["slot"]: each["plugin"] for each in report["stack"]}
        from_us = {each["distribution"] for each in report["stack"]} <= ours
        if from_us and names.keys() & {"device", "strategy"}:
            row = found.setdefault(" + ".join(names.values()) + _set(report.get("settings", {})), {})
            row["at once"] = max(row.get("at once", ""), ", ".join(map(str, report["worlds"])))
            simulated = report["simulated"] or not STOOD_IN.isdisjoint(names.values())
            for level, said in _levels(report, "simulated" if simulated else "real"):
                row[level] = max(row.get(level, ""), said, key=_badness)
    return found


def _set(settings: Mapping[str, str]) -> str:
    """List the options that make a row of its own: all but plans and derived sizes."""
    sizes = [path for path in settings if path.startswith("parallelism.")]
    follows = [path for path in sizes if settings[path] in ("1", "-1")]
    told = [
        f"{path.rpartition('.')[2]} {value}"
        for path, value in settings.items()
        if path not in follows and not value.startswith(("{", "["))
    ]
    return f", {', '.join(told)}" if told else ""


def _badness(result: str) -> tuple[bool, int]:
    """Of several runs of a stack, the worst counts; what is known to fail makes a result longer."""
    return "failed" in result, len(result)


def _levels(report: Mapping[str, Any], how: str) -> Iterator[tuple[str, str]]:
    for number, level in enumerate(LEVELS):
        outcomes = [check["outcome"] for check in report["checks"] if check["level"] == number]
        known = outcomes.count("xfailed")
        if "failed" in outcomes:
            yield level, "failed"
        elif outcomes:
            yield level, how + (f", {known} known to fail" if known else "")


def written(text: str) -> dict[str, Row]:
    """Read the row of each stack from docs/tested.md."""
    table = TABLE.search(text)
    if table is None:
        raise SystemExit(f"{PAGE} has no table that starts with\n{HEAD}")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[1].splitlines()]
    told = {row[0]: zip(("at once", *LEVELS), row[1:], strict=True) for row in rows}
    return {
        stack: {name: said for name, said in cells if said != "-" and not said.startswith("not run: ")}
        for stack, cells in told.items()
    }


def render(rows: Mapping[str, Row]) -> str:
    """Write the table; a level without a result says why."""
    lines = []
    for stack, row in sorted(rows.items()):
        cells = [row.get(level) or _not_run(stack, level) for level in LEVELS]
        lines.append(f"| {stack} | {row.get('at once', '-')} | {' | '.join(cells)} |\n")
    return HEAD + "".join(lines)


def _not_run(stack: str, level: str) -> str:
    reasons = [why for stacks, levels, why in NOT_RUN if fnmatch(stack, stacks) and level in levels]
    if not reasons:
        raise SystemExit(f"{stack}, {level}: no result and no reason\nrun the kit, or say why in NOT_RUN")
    return f"not run: {reasons[0]}"


def stale(rows: Mapping[str, Row], fresh: Mapping[str, Row]) -> list[str]:
    """List the differences between the table and the reports.

    A real result may be simulated here, a part of the worlds suffices, and a processor that has float16 fails
    fewer checks than others.
    """
    return [
        f"{stack}, {name}: the table says {rows.get(stack, {}).get(name)!r}, the kit {said!r}"
        for stack, row in fresh.items()
        for name, said in row.items()
        if not _agrees(name, rows.get(stack, {}).get(name, ""), said)
    ]


def _agrees(column: str, told: str, said: str) -> bool:
    """Compare a cell of the table with a result."""
    if column == "at once":
        return {*said.split(", ")} <= {*told.split(", ")}
    (how, known), (found, fails) = _parts(told), _parts(said)
    return how in (found, found.replace("simulated", "real")) and fails <= known


def _parts(result: str) -> tuple[str, int]:
    """Split a result into (how it was run, number of checks known to fail)."""
    known = KNOWN.search(result)
    return (result[: known.start()], int(known[1])) if known else (result, 0)


def main() -> int:
    """Update the table, or with --check compare it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the kit's reports lie")
    parser.add_argument("--check", action="store_true", help="exit with 1 if the table is stale")
    given = parser.parse_args()
    text = PAGE.read_text(encoding="utf-8")
    rows, fresh = written(text), reported(sorted(given.folder.glob("*.json")))
    if given.check:
        wrong = stale(rows, fresh)
        print("\n".join(wrong) or f"docs/tested.md agrees with the reports of {len(fresh)} stacks")
        return 1 if wrong else 0
    known = {*rows, *fresh, *ONLY_NAMED}
    merged = {stack: {**rows.get(stack, {}), **fresh.get(stack, {})} for stack in known}
    PAGE.write_text(TABLE.sub(lambda _: render(merged), text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

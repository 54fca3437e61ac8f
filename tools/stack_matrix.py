"""Write into docs/tested.md which stacks train, and which runs show it.

`python tools/stack_matrix.py .tox` reads the reports that the rows of tox have left: of the conformance kit,
and of the stacks that tests/stacks draws. Cells without a report are kept. `--check` compares the tables with
the reports. Imports no torch.
"""
# ruff: noqa: INP001, T201  # a script

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from configparser import ConfigParser
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "tested.md"
RANKS = ("never", "refused", "drawn", "full", "default")
"""The words of a cell. A later word takes the place of an earlier one."""
KINDS = ("single", "dispatched", "ddp", "fsdp 1", "fsdp 2")
KINDS += ("deepspeed 0", "deepspeed 1", "deepspeed 2", "deepspeed 3", "megatron")
PRECISIONS = ("fp32", "bf16", "fp16", "fp8-torchao", "fp8-te")
SIZES = ("cp", "dp_replicate", "ep", "pp", "sp", "tp")
EXTENSIONS = ("bitsandbytes", "ema", "replicas")
DEVICES = ("cpu", "cuda", "hpu", "mlu", "mps", "musa", "npu", "sdaa", "xla", "xpu")
TABLES = {
    "a strategy with": ((*PRECISIONS, *SIZES, *EXTENSIONS, *DEVICES), KINDS),
    "a precision with": ((*SIZES, *DEVICES), PRECISIONS),
}
"""Title of the first column -> rows and columns of a table."""
USUAL = {"fsdp": ("fsdp.fsdp_version", "2"), "deepspeed": ("deepspeed.zero_stage", "2")}
"""Strategy -> the option with its version or stage, and the option's default."""
ALIASES = {"native": "cpu", "tensor-parallel": "tp"}

Cells = dict[frozenset[str], str]
"""Two parts of a stack -> one of RANKS."""


def cells_of(files: Iterable[Path]) -> Cells:
    """Read the word of each pair of parts from reports."""
    found: Cells = {}
    for file in files:
        report = json.loads(file.read_text(encoding="utf-8"))
        if "drawn" in report:
            refused = report["refused"]
            told = _pairs(refused or parts_of_drawn(report["drawn"]))
            word = "refused" if refused else "drawn"
        else:
            told, word = _pairs(parts_of_kit(report)), tier_of(file)
        for pair in told:
            found[pair] = max(found.get(pair, word), word, key=RANKS.index)
    return found


def tier_of(file: Path) -> str:
    """Return `default` if plain `tox` runs the row whose folder holds the report."""
    settings = ConfigParser(interpolation=None)
    settings.read(ROOT / "tox.ini", encoding="utf-8")
    rows = set(re.findall(r"[\w-]+", settings["tox"]["env_list"]))
    return "full" if rows.isdisjoint(file.parts) else "default"


def parts_of_drawn(stack: Mapping[str, Any]) -> set[str]:
    """List the parts of a stack that was drawn."""
    return {stack["device"], stack["strategy"], stack["precision"], *stack["sizes"], *stack["extensions"]}


def parts_of_kit(report: Mapping[str, Any]) -> set[str]:
    """List the parts of a stack of the kit; none if it did not train."""
    checks = [check for check in report["checks"] if check["level"] > 1]
    outcomes = {check["outcome"] for check in checks}
    if "passed" not in outcomes or "failed" in outcomes:
        return set()
    named = {each["slot"]: each["plugin"] for each in report["stack"]}
    strategy = named.get("strategy", "single")
    option, usual = USUAL.get(strategy, ("", ""))
    kind = f"{strategy} {report['settings'].get(option, usual)}".strip()
    plugins = {ALIASES.get(each["plugin"], each["plugin"]) for each in report["stack"]} - {strategy}
    passed = {check["name"] for check in checks if check["outcome"] == "passed"}
    low = {name for name in ("bf16", "fp16") if any(f"mixed_precision[{name}]" in each for each in passed)}
    device = set() if "device" in named else {"cpu"}
    precision = set() if "precision" in named else {"fp32"}
    return {kind, *plugins, *low, *device, *precision, *_sizes(report)} - _alone(report)


def _sizes(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield the dimensions that settings make larger than 1."""
    for path, value in report["settings"].items():
        section, _, dim = path.rpartition(".")
        if section == "parallelism" and dim in SIZES and value != "1":
            yield dim


def _alone(report: Mapping[str, Any]) -> set[str]:
    """In one process no dimension is larger than 1."""
    return set(SIZES) if max(report["worlds"]) == 1 else set()


def _pairs(parts: Iterable[str]) -> set[frozenset[str]]:
    return {frozenset(pair) for pair in product(parts, repeat=2) if len(set(pair)) == 2}


def read(text: str) -> Cells:
    """Read the cells of the page's tables."""
    found: Cells = {}
    for title, (_, columns) in TABLES.items():
        for line in _table(title).search(text)[1].splitlines():  # type: ignore[index]
            row, *words = [cell.strip() for cell in line.strip("|").split("|")]
            found |= {frozenset((row, column)): word for column, word in zip(columns, words, strict=True)}
    return found


def _head(title: str) -> str:
    columns = TABLES[title][1]
    return f"| {title} | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}\n"


def _table(title: str) -> re.Pattern[str]:
    return re.compile(re.escape(_head(title)) + r"((?:\|.*\n)*)")


def render(title: str, cells: Cells) -> str:
    """Write a table."""
    rows, columns = TABLES[title]
    return _head(title) + "".join(
        f"| {row} | {' | '.join(cells.get(frozenset((row, column)), 'never') for column in columns)} |\n"
        for row in rows
    )


def merged(cells: Cells, fresh: Cells) -> Cells:
    """Return both. A stack that trains now is no longer refused, and the reverse."""
    both = dict(cells)
    for pair, word in fresh.items():
        old = cells.get(pair, "never")
        both[pair] = word if word == "refused" or old == "refused" else max(old, word, key=RANKS.index)
    return both


def stale(cells: Cells, fresh: Cells) -> list[str]:
    """List pairs that train and are called refused, the reverse, and pairs that run by default unsaid."""
    return [
        f"{' with '.join(sorted(pair))}: the table says {cells[pair]}, a run {word}"
        for pair, word in fresh.items()
        if pair in cells and cells[pair] not in (word, "never")
        if word == "default" or "refused" in (cells[pair], word)
    ]


def main() -> int:
    """Update the tables, or with --check compare them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="reports, or folders of rows of tox")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a table is stale")
    given = parser.parse_args()
    folder, text = given.folder.resolve(), PAGE.read_text(encoding="utf-8")
    files = (file for pattern in ("*.json", "*/tmp/kit/*.json") for file in folder.glob(pattern))
    cells, fresh = read(text), cells_of(files)
    if given.check:
        wrong = stale(cells, fresh)
        print("\n".join(wrong) or "docs/tested.md agrees with the stacks that ran")
        return 1 if wrong else 0
    for title in TABLES:
        table = render(title, merged(cells, fresh))
        text = _table(title).sub(lambda _, table=table: table, text)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A comparison as one self-contained page, with a heat map of layers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from html import escape
from typing import Final

from accel_checkpoint_tools.diff import Comparison, TensorPair
from accel_checkpoint_tools.report import told, value_lines
from accel_checkpoint_tools.sections import SECTIONS
from accel_checkpoint_tools.text import in_order

__all__ = ["page"]

_LEAST: Final = -8
"""Logarithm of the smallest relative difference that has a colour of its own."""
_STYLE: Final = """
:root { color-scheme: light dark; font: 14px/1.4 system-ui, sans-serif; }
body { margin: 2rem; }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; display: block; overflow-x: auto; }
th { font-weight: normal; text-align: left; padding: 2px 8px; white-space: nowrap; }
thead th { writing-mode: vertical-rl; transform: rotate(180deg); vertical-align: bottom; padding: 8px 2px; }
thead th:first-child { visibility: hidden; }
td { min-width: 3.2em; height: 1.7em; text-align: center;
  border: 1px solid light-dark(#ddd, #444); font-size: 12px; }
td.equal { color: light-dark(#999, #888); }
td.heat { background: color-mix(in oklab,
  light-dark(#fff3d6, #3a3320), light-dark(#d7301f, #e4572e) var(--heat)); }
td.problem { background: light-dark(#4a4a9c, #8a8ae0); color: light-dark(#fff, #000); }
td.none { border: none; }
li { margin: .15rem 0; overflow-wrap: anywhere; }
code, li { font-family: ui-monospace, monospace; font-size: 12.5px; }
"""
_LAYER: Final = re.compile(r"(?P<layer>(?:.*?\.)?\d+)\.(?P<part>.+)")
"""A name up to its first number, and the rest."""


def page(found: Comparison) -> str:
    """Return the page; it needs no network, and no script."""
    title = "Checkpoints compared"
    return "\n".join(
        [
            "<!doctype html>",
            f'<html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
            f"<style>{_STYLE}</style></head><body>",
            f"<h1>{title}</h1>",
            f"<p>A: <code>{escape(str(found.a))}</code><br>B: <code>{escape(str(found.b))}</code></p>",
            f"<p>{escape(_summary(found))}</p>",
            *_maps(found),
            *_values(found),
            "</body></html>",
        ]
    )


def _summary(found: Comparison) -> str:
    differing = sum(pair.differs for pair in found.tensors)
    return (
        f"{differing} of {len(found.tensors)} tensors and {len(found.values)} other values differ."
        " A cell is a tensor: its number and colour are the norm of the difference over the norm of A;"
        " = is equal. Point at a cell for more."
    )


def _maps(found: Comparison) -> Iterator[str]:
    tables: dict[str, list[tuple[str, TensorPair]]] = {}
    for pair in found.tensors:
        name, _, part = pair.name.rpartition("/") if pair.section == "optimizer" else (pair.name, "", "")
        title = " · ".join(filter(None, [pair.key[0], pair.section, part]))
        tables.setdefault(title, []).append((name, pair))
    for title, members in tables.items():
        yield f"<h2>{escape(title)}</h2>"
        yield from _table(members)


def _table(members: list[tuple[str, TensorPair]]) -> Iterator[str]:
    cells: dict[str, dict[str, TensorPair]] = {}
    for name, pair in members:
        layer, part = _split(name)
        cells.setdefault(layer, {})[part] = pair
    columns = list(dict.fromkeys(part for row in cells.values() for part in row))
    heads = "".join(f"<th>{escape(column)}</th>" for column in columns)
    yield f"<table><thead><tr><th>layer</th>{heads}</tr></thead><tbody>"
    for layer in sorted(cells, key=in_order):
        row = "".join(_cell(cells[layer].get(column)) for column in columns)
        yield f"<tr><th>{escape(layer)}</th>{row}</tr>"
    yield "</tbody></table>"


def _split(name: str) -> tuple[str, str]:
    """Return the layer of a tensor, up to the first number in its name, and the rest."""
    if match := _LAYER.fullmatch(name):
        return match["layer"], match["part"]
    layer, _, part = name.rpartition(".")
    return layer or "-", part


def _cell(pair: TensorPair | None) -> str:
    if pair is None:
        return '<td class="none"></td>'
    if not pair.differs:
        return f'<td class="equal" title="{escape(pair.key[1])}: equal">=</td>'
    title = escape(f"{pair.key[1]}: {told(pair)}")
    if pair.difference is None or pair.difference.relative is None:
        return (
            f'<td class="problem" title="{title}">{"≠" if pair.a and pair.b else "A" if pair.a else "B"}</td>'
        )
    relative = pair.difference.relative
    level = (math.log10(relative) - _LEAST) / -_LEAST if 0 < relative < math.inf else float(relative != 0)
    heat = f"{100 * min(1.0, max(0.0, level)):.0f}%"
    return f'<td class="heat" style="--heat:{heat}" title="{title}">{relative:.0e}</td>'


def _values(found: Comparison) -> Iterator[str]:
    for section in found.sections:
        lines = [*value_lines([value for value in found.values if value.section == section])]
        if lines:
            yield f"<h2>{escape(section)}: {escape(SECTIONS.get(section, 'other state'))}</h2><ul>"
            yield from (f"<li>{escape(line)}</li>" for line in lines)
            yield "</ul>"

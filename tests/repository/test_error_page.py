"""docs/errors.md quotes messages that the sources have, and gives an answer to each."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ("accel_core", "backends/ddp/src", "backends/fsdp/src", "contrib/monitor/src")
ROW = re.compile(r"^\| (.+?) \| (.+) \|$", re.MULTILINE)


@cache
def texts() -> str:
    """All texts of the sources, what is filled in as `…`."""
    found = []
    for folder in SOURCES:
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = (it.value if isinstance(it, ast.Constant) else "…" for it in node.values)
                    found.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return "\n".join(found)


def quoted() -> list[str]:
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    first = [row[1] for row in ROW.finditer(page)]
    return [cell[1:-1] for cell in first if cell.startswith("`") and cell.endswith("`")]


def test_each_quoted_message_is_one_of_ours() -> None:
    assert len(quoted()) > 15
    assert [message for message in quoted() if message not in texts()] == []

"""Functions stay short. Counted are the lines of a body that hold code: no docstring, comment, blank line."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LONGEST = 45
USUAL = 20
"""Lines that 95 of 100 functions of core have at most."""
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
PACKAGES = [ROOT / "accel_core", *sorted(ROOT.glob("*/*/src"))]


def sizes(package: Path) -> dict[str, int]:
    """Map each function, as file:line, to its lines of code."""
    found = {}
    for file in package.rglob("*.py"):
        source = file.read_text(encoding="utf-8")
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        code = {
            line
            for kind, _, start, end, _ in tokens
            if kind not in NO_CODE
            for line in range(start[0], end[0] + 1)
        }
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
                lines = {line for part in body for line in range(part.lineno, (part.end_lineno or 0) + 1)}
                found[f"{file.relative_to(ROOT)}:{node.lineno}"] = len(lines & code)
    return found


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: str(package.relative_to(ROOT)))
def test_no_function_is_too_long_to_be_read_at_once(package: Path) -> None:
    assert {place: lines for place, lines in sizes(package).items() if lines > LONGEST} == {}


def test_most_functions_of_core_are_short() -> None:
    lines = sorted(sizes(ROOT / "accel_core").values())

    assert lines[len(lines) * 95 // 100] <= USUAL

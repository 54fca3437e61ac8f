"""Functions stay short. Counted are the lines of a body that hold code: no docstring, comment, blank line."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

from checkout import modules, packages, place, refuse, text, tree

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


def sizes(file: Path) -> Iterator[tuple[int, str, int]]:
    """(line, name, lines of code) of each function."""
    code: set[int] | None = None
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
            lines = {line for part in body for line in range(part.lineno, (part.end_lineno or 0) + 1)}
            if len(lines) > USUAL:
                code = lines_of_code(file) if code is None else code
                lines &= code
            yield node.lineno, node.name, len(lines)


def lines_of_code(file: Path) -> set[int]:
    return {
        line
        for kind, _, start, end, _ in tokenize.generate_tokens(io.StringIO(text(file)).readline)
        if kind not in NO_CODE
        for line in range(start[0], end[0] + 1)
    }


def test_no_function_is_too_long_to_be_read_at_once() -> None:
    refuse(
        (
            f"{place(file, line)}: {name} has {count} lines"
            for file in modules()
            for line, name, count in sizes(file)
            if count > LONGEST
        ),
        f"a function of more than {LONGEST} lines of code: split it",
    )


def test_most_functions_of_core_are_short() -> None:
    found = [
        (count, place(file, line)) for file in packages()["accel_core"] for line, _, count in sizes(file)
    ]
    long = sorted(it for it in found if it[0] > USUAL)
    too_many = long[: max(0, len(long) - len(found) // 20)]
    refuse(
        (f"{where}: {count} lines" for count, where in too_many),
        f"more than 5 of 100 functions of core have over {USUAL} lines: split these, or longer ones",
    )

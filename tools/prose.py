"""Count the habits of translated prose per 1,000 words of docstrings and comments.

    python tools/prose.py accel_core/*

pluggy, Lightning Fabric and Accelerate have at most 0.2 "what", 0.1 "those", 0.4 "that of" and 1.4 "where".
tests/repository/test_prose.py holds core to its bars.
"""
# ruff: noqa: INP001, T201  # a script

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

HABITS = {
    "what": r"\bwhat\b(?! if)",
    "those": r"\bthose\b",
    "that of": r"\b(?:that|those|one|ones) of\b",
    "where": r"\bwhere\b",
}
DIRECTIVE = re.compile(r"#\s*(noqa|type:|mypy:|pragma)")
WORD = re.compile(r"[A-Za-z][\w'-]*")


def prose(source: str) -> Iterator[str]:
    """Yield the docstrings, the strings below attributes and the comments of a module."""
    for node in ast.walk(ast.parse(source)):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield value.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not DIRECTIVE.match(token.string):
            yield token.string.lstrip("# ")


def habits(files: Iterable[Path]) -> dict[str, float]:
    """Return each habit -> how often it occurs per 1,000 words of these modules."""
    words, found = 0, Counter[str]()
    for file in files:
        for text in prose(file.read_text(encoding="utf-8")):
            words += len(WORD.findall(text))
            found.update({name: len(re.findall(habit, text)) for name, habit in HABITS.items()})
    return {name: 1000 * found[name] / max(1, words) for name in HABITS}


def main() -> None:
    """Print a line for each path."""
    for each in map(Path, sys.argv[1:]):
        counts = habits([each] if each.is_file() else sorted(each.rglob("*.py")))
        print(f"{each}: {', '.join(f'{name} {count:.1f}' for name, count in counts.items())}")


if __name__ == "__main__":
    main()

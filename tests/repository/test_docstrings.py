"""Docstrings begin as CONTRIBUTING's style guide says."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from checkout import modules, place, refuse, tree

RIDDLE = re.compile(r"(What|Who|Whoever|Which|Where|Whether|How|Those|That)\b")


def first_lines(module: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, first line) of each docstring, those of constants included."""
    for node in ast.walk(module):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, value.value.strip().partition("\n")[0]


def test_no_docstring_begins_with_a_question_word() -> None:
    refuse(
        (
            f"{place(file, line)}: {first}"
            for file in modules()
            for line, first in first_lines(tree(file))
            if RIDDLE.match(first)
        ),
        "a docstring begins with a question word: begin with an imperative verb or a noun",
    )


def test_a_question_word_is_a_whole_word() -> None:
    assert RIDDLE.match("What a run is.")
    assert not RIDDLE.match("Whole weights of a model.")
    assert list(first_lines(ast.parse('def f():\n    """Whether it works."""'))) == [(2, "Whether it works.")]

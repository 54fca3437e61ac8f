"""Docstrings begin as CONTRIBUTING's style guide says."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = sorted(path for path in (ROOT / "accel_core").iterdir() if path.is_dir() and path.name[0] != "_")
PACKAGES = [*sorted(ROOT.glob("accel_core/*.py")), *ROOMS, *sorted(ROOT.glob("*/*/src/accel_*"))]
RIDDLE = re.compile(r"(What|Who|Whoever|Which|Where|Whether|How|Those|That)\b")


def name_of(package: Path) -> str:
    return package.stem


def headlines(source: str) -> Iterator[tuple[int, str]]:
    """(line, first line) of each docstring, those of constants included."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, value.value.strip().partition("\n")[0]


def files_of(package: Path) -> list[Path]:
    files = sorted(package.rglob("*.py")) if package.is_dir() else [package]
    return [file for file in files if "templates" not in file.parts]


def riddles(package: Path) -> list[str]:
    return [
        f"{file.relative_to(ROOT)}:{line}: {text}"
        for file in files_of(package)
        for line, text in headlines(file.read_text(encoding="utf-8"))
        if RIDDLE.match(text)
    ]


def long_headlines(package: Path) -> list[str]:
    return [
        f"{file.relative_to(ROOT)}:{line}: {text}"
        for file in files_of(package)
        for line, text in headlines(file.read_text(encoding="utf-8"))
        if len(text) > 79
    ]


@pytest.mark.parametrize("package", PACKAGES, ids=name_of)
def test_a_docstring_does_not_begin_with_a_question_word(package: Path) -> None:
    assert riddles(package) == []


@pytest.mark.parametrize("package", PACKAGES, ids=name_of)
def test_the_first_line_of_a_docstring_has_at_most_79_characters(package: Path) -> None:
    assert long_headlines(package) == []


@pytest.mark.parametrize("line", ["What a run is.", "Whether it works."])
def test_a_riddle_would_be_seen(line: str) -> None:
    assert RIDDLE.match(line)
    assert list(headlines(f'def f():\n    """{line}"""')) == [(2, line)]


def test_a_noun_phrase_and_an_imperative_may_begin_a_docstring() -> None:
    assert not RIDDLE.match("Whole weights of a model.")
    assert not RIDDLE.match("Howl at the moon.")

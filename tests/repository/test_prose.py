"""Docstrings and comments of core and of each backend are plain technical English, by counts of habits."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkout import packages, refuse, tool

BARS = {"what": 0.8, "those": 0.5, "that of": 0.8, "where": 1.5}
"""Habit -> how often it may occur per 1,000 words."""


WRITTEN = sorted(
    name for name, files in packages().items() if name == "accel_core" or "backends" in files[0].parts
)
"""Packages that are held to the bars."""


@pytest.mark.parametrize("package", WRITTEN)
def test_it_is_written_in_plain_english(package: str) -> None:
    counts = tool("prose").habits(packages()[package])
    refuse(
        (
            f"{name!r}: {counts[name]:.1f} per 1,000 words, the bar is {bar}"
            for name, bar in BARS.items()
            if counts[name] > bar
        ),
        f"a habit of translated prose in {package}: `python tools/prose.py FOLDER` says in which file",
    )


def test_docstrings_and_comments_are_counted_and_messages_are_not(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        '"""What it is."""\nx = 1  # those of others, where it is what\nraise ValueError("what")\n'
    )
    counts = tool("prose").habits([module])
    assert {name: round(count * 10 / 1000) for name, count in counts.items()} == {
        "what": 1,
        "those": 1,
        "that of": 1,
        "where": 1,
    }

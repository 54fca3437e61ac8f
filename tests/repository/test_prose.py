"""The docstrings and comments of core are plain technical English, by a count of four habits."""

from __future__ import annotations

from pathlib import Path

from checkout import packages, refuse, tool

BARS = {"what": 0.8, "those": 0.5, "that of": 0.8, "where": 1.5}
"""Habit -> how often it may occur per 1,000 words."""


def test_core_is_written_in_plain_english() -> None:
    counts = tool("prose").habits(packages()["accel_core"])
    refuse(
        (
            f"{name!r}: {counts[name]:.1f} per 1,000 words, the bar is {bar}"
            for name, bar in BARS.items()
            if counts[name] > bar
        ),
        "a habit of translated prose: `python tools/prose.py accel_core/*` says in which room",
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

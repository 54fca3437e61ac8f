"""The page of times reads the names of environments as tox does."""

from __future__ import annotations

from checkout import tool


def test_names_with_braces_stand_for_several_environments() -> None:
    assert tool("tox_times").expanded("py{310,312}-x") == ["py310-x", "py312-x"]

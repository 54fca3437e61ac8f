"""Mistakes of a plugin's author that used to pass in silence, or ended in a bare traceback."""

from __future__ import annotations

import sys

import pytest

from accel_core.config.convert import plain
from accel_core.contract.card import incompatibility
from accel_core.errors import PluginError
from accel_core.plugins.combining import ANSWERS, Implementation


@pytest.mark.parametrize(
    ("kind", "answer", "wanted"),
    [
        ("Sequence", "a reason", "gave a str, not a sequence"),
        ("Mapping", ["a"], "gave a list, not a mapping"),
    ],
)
def test_an_answer_of_a_wrong_shape_names_the_plugin(kind, answer, wanted):
    combined = ANSWERS[kind]("refuse", [Implementation("pony", 4, lambda: answer)])
    with pytest.raises(PluginError, match=f"hook refuse: pony {wanted}"):
        combined()


def test_a_version_that_never_was_is_not_served():
    assert "upgrade the plugin" in incompatibility("0.9")


def test_a_set_is_written_in_one_order():
    assert plain(frozenset("qkvo")) == ["k", "o", "q", "v"]


def test_python_runs_the_package(run_command):
    done = run_command(
        [sys.executable, "-m", "accel_core", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("accel, version")

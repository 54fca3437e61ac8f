"""Small promises to plugin authors that have no page of their own."""

from __future__ import annotations

import sys

from accel_core.config.convert import plain
from accel_core.contract.card import Card, incompatibility


def test_a_version_that_never_was_is_not_served():
    card = Card(name="pony", slot="device", summary="", api_version="0.9")

    assert "upgrade the plugin" in incompatibility(card)


def test_a_set_is_written_in_one_order():
    assert plain(frozenset("qkvo")) == ["k", "o", "q", "v"]


def test_python_runs_the_package(run_command):
    done = run_command(
        [sys.executable, "-m", "accel_core", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("accel, version")

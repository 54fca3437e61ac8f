"""plugin_status: whether a plugin can be used here."""

from __future__ import annotations

import pytest

from accel_core import Accelerator, plugin_status


@pytest.mark.parametrize(
    ("source", "status"),
    [
        ({}, "available"),
        ({"probe": "lambda: 'no driver'"}, "unavailable"),
        ({"api_version": "'99.0'"}, "incompatible"),
    ],
)
def test_it_is_what_plugins_lists(toy_plugin, source, status):
    toy_plugin("toy", "strategy", **source)

    assert plugin_status("toy") == status


def test_a_plugin_nobody_has_installed_is_missing():
    assert plugin_status("nowhere") == "missing"


def test_a_strategy_names_its_own_distributed_type(toy_plugin):
    toy_plugin("toy", distributed_type="'QUANTUM'", implementation="'accel_core.native.strategy:Single'")
    accelerator = Accelerator(cpu=True, strategy="toy")

    assert accelerator.distributed_type == "QUANTUM"
    accelerator.end_training()

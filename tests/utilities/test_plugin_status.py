"""plugin_status: whether a plugin can be used here."""

from __future__ import annotations

import pytest
from attrs import evolve

from accel_core import Accelerator, plugin_status
from accel_core.plugins.discovery import discover
from accel_core.runtime.selection import Chosen


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
    toy_plugin("toy", distributed_type="'QUANTUM'", implementation="'accel_core.defaults.base:Single'")
    accelerator = Accelerator(cpu=True, strategy="toy")

    assert accelerator.distributed_type == "QUANTUM"
    accelerator.end_training()


@pytest.mark.parametrize(
    ("strategy", "device", "word"),
    [
        ("ddp", "cuda", "MULTI_GPU"),
        ("ddp", "npu", "MULTI_NPU"),
        ("ddp", "musa", "MULTI_MUSA"),
        ("ddp", "mlu", "MULTI_MLU"),
        ("ddp", "sdaa", "MULTI_SDAA"),
        ("ddp", "native", "MULTI_DEVICE"),
        ("fsdp", "cuda", "FSDP"),
    ],
)
def test_a_device_completes_the_word_of_a_strategy_for_any_device(strategy, device, word):
    accelerator = Accelerator(cpu=True)
    run, (over, under) = accelerator.run, [discover().get(name) for name in (strategy, device)]
    if None in (over, under):
        pytest.skip("needs both packages")
    # The chips are not here: the property goes by the cards alone.
    strategies = {run.stack.default: Chosen(over, "asked for")}
    run.stack = evolve(run.stack, strategies=strategies, device=Chosen(under, "asked for"))

    assert accelerator.distributed_type == word
    accelerator.end_training()

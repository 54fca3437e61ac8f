"""Optimizers that were not prepared, of models that were, on two ranks with other data."""

from __future__ import annotations

import gc
import weakref

import pytest
import unprepared_job
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

from accel_core import Accelerator


@pytest.mark.parametrize("made_before", [True, False])
def test_where_nothing_else_reduces_its_gradients_its_step_is_an_error(
    toy_plugin, made_before, run_processes
):
    toy_plugin("tardy", source=unprepared_job.CARD)
    for said, first, *_ in run_processes(unprepared_job.stepped, "tardy", made_before):
        assert said.startswith("the SGD steps weights of unit 'unit0' that no prepared optimizer holds")
        assert "strategy 'tardy' reduces gradients when a prepared one steps" in said
        assert first == 0.0


def test_once_it_is_prepared_it_steps_by_all_ranks_gradients(toy_plugin, run_processes):
    toy_plugin("tardy", source=unprepared_job.CARD)
    found = run_processes(unprepared_job.stepped, "tardy", True)
    assert [last for *_, last in found] == [-1.5 * 2] * 2  # the last step repeats it, after `free_memory`


def test_a_parameter_in_the_memory_of_one_that_was_replaced_is_somebody_elses(toy_plugin, run_processes):
    toy_plugin("tardy", source=unprepared_job.CARD)
    assert run_processes(unprepared_job.stepped_in_the_place_of_another) == [(True, 0.0)] * 2


def test_weights_that_the_prepared_optimizer_does_not_hold_are_stepped_by_no_other(toy_plugin, run_processes):
    """One of two optimizers was not prepared. The prepared one may step by another, as Lookahead does."""
    toy_plugin("tardy", source=unprepared_job.CARD)
    for said, weights in run_processes(unprepared_job.stepped_beside_a_prepared_one, "tardy"):
        assert said.startswith("the SGD steps weights of unit 'unit0' that no prepared optimizer holds, and")
        assert weights == [1.0 - 1.5, 1.0]


def test_the_watch_for_such_steps_keeps_no_run_and_ends_with_it():
    gc.collect()  # runs that other tests have dropped end with their watches
    before = len(_global_optimizer_pre_hooks)
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(1, 1))
    assert len(_global_optimizer_pre_hooks) == before + 1
    run = weakref.ref(accelerator.run)
    del accelerator
    gc.collect()
    assert run() is None
    assert len(_global_optimizer_pre_hooks) == before

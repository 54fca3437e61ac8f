"""The calls of ours on the path of a step and of a batch, counted: a count has no noise."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel_core
from accel_core.training import accumulation

ROOT = str(Path(accel_core.__file__).parent)


def calls(action: Callable[[], object]) -> int:
    """How many functions of ours run, and how often generators of ours go on."""
    counted = 0
    gc.collect()  # until then, runs that other tests have dropped may watch each step

    def count(frame, event, argument):
        nonlocal counted
        counted += event == "call" and frame.f_code.co_filename.startswith((ROOT, "<adapter"))

    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
    return counted


class Loss:
    """A loss whose backward does nothing."""

    requires_grad = True

    def backward(self) -> None:
        pass

    def __truediv__(self, divisor: int) -> Loss:
        return self


class Idle(torch.optim.SGD):
    def step(self, closure=None):
        pass


def window_of(accelerator, layers: int, size: int, *, clips: bool) -> Callable[[], None]:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers)))
    model, optimizer = accelerator.prepare(model, Idle(model.parameters(), lr=0.1))

    def window() -> None:
        for _ in range(size):
            with accelerator.accumulate(model):
                accelerator.backward(Loss())
                if clips:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    for _ in range(3):
        window()
    return window


@pytest.mark.parametrize(
    ("size", "clips", "most"),
    [(1, False, 16), (1, True, 21), (4, False, 59)],
)
@pytest.mark.parametrize("layers", [1, 20])
def test_a_window_makes_few_calls_however_many_layers_there_are(accelerator_of, size, clips, most, layers):
    accelerator = accelerator_of(gradient_accumulation_steps=size)
    assert calls(window_of(accelerator, layers, size, clips=clips)) <= most


def test_a_batch_of_one_reader_makes_three_calls(accelerator):
    def epoch(batches: int) -> int:
        loader = accelerator.prepare(DataLoader(TensorDataset(torch.zeros(4 * batches, 2)), batch_size=4))
        return calls(lambda: [None for _ in loader])

    epoch(2)
    assert (epoch(300) - epoch(100)) / 200 < 3.3


# -- contexts in which gradients are not reduced -------------------------------------------------------


class Stack(ExitStack):
    made = 0
    interruptions = 0

    def __init__(self):
        super().__init__()
        Stack.made += 1

    def close(self):
        if Stack.interruptions:
            Stack.interruptions -= 1
            raise KeyboardInterrupt
        super().close()


@pytest.fixture
def reducing(accelerator_of, monkeypatch):
    """A model whose strategy reduces in each backward: (accelerator, model, the contexts entered now)."""

    def make(size, *others):
        monkeypatch.setattr(accumulation, "ExitStack", Stack)
        monkeypatch.setattr(Stack, "made", 0)
        accelerator, quiet = accelerator_of(gradient_accumulation_steps=size), []
        models = [nn.Linear(2, 2), *others]
        over_all = torch.optim.SGD([p for each in models for p in each.parameters()], lr=0.1)
        model = accelerator.prepare(*models, over_all)[0]

        @contextmanager
        def no_sync(unit, models):
            quiet.append(models)
            try:
                yield
            finally:
                quiet.pop()

        accelerator.run.units[0].steps.no_sync = no_sync
        return accelerator, model, quiet

    return make


@pytest.mark.parametrize(("size", "made"), [(1, 0), (4, 3)])
def test_only_micro_batches_that_do_not_reduce_enter_a_context(reducing, size, made):
    accelerator, model, quiet = reducing(size)
    for number in range(size):
        with accelerator.accumulate(model):
            assert bool(quiet) is (number + 1 < size)
        assert not quiet
    assert Stack.made == made


def test_a_micro_batch_that_is_made_one_of_the_middle_does_not_reduce(reducing):
    accelerator, model, quiet = reducing(1)
    with accelerator.accumulate(model):
        accelerator.sync_gradients = False
        assert quiet
    assert not quiet


def test_of_a_units_models_those_that_accumulate_names_do_not_reduce(reducing):
    other = nn.Linear(2, 2)
    accelerator, _, quiet = reducing(2, other)
    with accelerator.accumulate(other):
        assert quiet == [[other]]


def test_all_of_a_units_models_do_not_reduce_where_accumulate_names_none(reducing):
    accelerator, model, quiet = reducing(2)
    with accelerator.accumulate():
        assert quiet == [[model]]


def test_contexts_end_although_ctrl_c_comes_while_they_do(reducing):
    accelerator, model, quiet = reducing(2)
    Stack.interruptions = 1
    with pytest.raises(KeyboardInterrupt), accelerator.accumulate(model):
        assert quiet
    assert not quiet


def test_contexts_that_ctrl_c_keeps_from_ending_are_ended_by_the_next_micro_batch(reducing):
    accelerator, model, quiet = reducing(2)
    Stack.interruptions = 2
    with pytest.raises(KeyboardInterrupt), accelerator.accumulate(model):
        pass
    assert quiet
    with accelerator.accumulate(model):
        assert not quiet

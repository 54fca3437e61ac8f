"""Code of other people's that fails while a checkpoint is loaded: what is touched, and what is said."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accel_core import Accelerator, CheckpointError


class Counter:
    """A registered object; its next load fails with `error`."""

    def __init__(self):
        self.count, self.error = 1, None

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        if self.error:
            raise self.error
        self.count = state["count"]


class Scaled(nn.Linear):
    error = None

    def get_extra_state(self):
        return 1

    def set_extra_state(self, state):
        if self.error:
            raise self.error


@pytest.fixture
def saved(tmp_path):
    """A run, its model and two registered objects, saved, with other values afterwards."""
    accelerator = Accelerator(device="cpu")
    model = Scaled(2, 2)
    model, _ = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
    counters = Counter(), Counter()
    accelerator.register_for_checkpointing(*counters)
    accelerator.save_state(tmp_path / "ck")
    with torch.no_grad():
        model.weight.fill_(7)
    for counter in counters:
        counter.count = 7
    yield accelerator, model, counters, tmp_path / "ck"
    accelerator.end_training()


def test_a_registered_object_that_fails_is_named_and_nothing_else_is_touched(saved):
    accelerator, model, (first, second), folder = saved
    first.error = KeyError("boom")
    with pytest.raises(CheckpointError, match=r"registered object 0 \(Counter\).*KeyError: 'boom'") as raised:
        accelerator.load_state(folder)
    assert isinstance(raised.value.__cause__, KeyError)
    assert "nothing else was changed" in str(raised.value)
    assert torch.equal(model.weight, torch.full((2, 2), 7.0))
    assert second.count == 7


def test_what_was_restored_before_the_failure_is_said(saved):
    accelerator, model, (first, second), folder = saved
    second.error = ValueError("boom")
    with pytest.raises(CheckpointError, match=r"mixed state: of .* it has registered object 0 \(Counter\)"):
        accelerator.load_state(folder)
    assert first.count == 1
    assert torch.equal(model.weight, torch.full((2, 2), 7.0))


@pytest.mark.parametrize(
    ("restored", "listed"), [(5, "object 4 (Counter)\n"), (7, "object 4 (Counter) and 2 more\n")]
)
def test_of_what_was_restored_five_are_listed_and_the_others_counted(tmp_path, restored, listed):
    accelerator = Accelerator(device="cpu")
    counters = [Counter() for _ in range(restored + 1)]
    accelerator.register_for_checkpointing(*counters)
    accelerator.save_state(tmp_path / "ck")
    counters[-1].error = ValueError("boom")
    with pytest.raises(CheckpointError) as raised:
        accelerator.load_state(tmp_path / "ck")
    assert f"registered {listed}" in str(raised.value)
    accelerator.end_training()


def test_extra_state_that_fails_is_named_before_weights_are_touched(saved):
    accelerator, model, _, folder = saved
    model.error = RuntimeError("boom")
    with pytest.raises(CheckpointError, match=r"extra state of unit0.*Scaled.*RuntimeError: boom"):
        accelerator.load_state(folder)
    assert torch.equal(model.weight, torch.full((2, 2), 7.0))

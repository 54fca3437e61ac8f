"""`to_kwargs` leaves to torch what equals our default, so our defaults must be torch's."""

from __future__ import annotations

import inspect

import pytest

from accel_core import AutocastKwargs, GradScalerKwargs, InitProcessGroupKwargs, ProfileKwargs
from accel_core.config.convert import plain

torch = pytest.importorskip("torch")


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (AutocastKwargs, torch.autocast),
        (GradScalerKwargs, torch.amp.GradScaler),
        (InitProcessGroupKwargs, torch.distributed.init_process_group),
        (ProfileKwargs, torch.profiler.profile),
    ],
)
def test_each_default_is_that_of_torch(ours, theirs):
    expected = {name: parameter.default for name, parameter in inspect.signature(theirs).parameters.items()}
    found = plain(ours())
    assert {name: found[name] for name in found.keys() & expected.keys()} == {
        name: expected[name] for name in found.keys() & expected.keys()
    }
    assert len(found.keys() & expected.keys()) > 1

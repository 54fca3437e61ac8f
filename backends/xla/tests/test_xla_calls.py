"""What several processes ask of torch_xla: recorded, each call held against the installed signatures."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accel_core import LaunchError
from accel_core.testing import Recorder
from accel_xla.communication import XlaCollectives
from accel_xla.data_parallel import XlaDataParallel
from accel_xla.device import _require_replicas

pytestmark = pytest.mark.skipif(find_spec("torch_xla") is None, reason="needs torch_xla: tox -e xla-real")


class Control:
    """Core's group on the CPU, of three ranks whose XLA ordinals are 2, 0, 1."""

    rank, size = 0, 3

    def all_gather_object(self, value: Any) -> list[Any]:
        return [2, 0, 1]


@pytest.fixture
def xm(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    from torch_xla import runtime
    from torch_xla.core import xla_model

    monkeypatch.setattr(runtime, "global_ordinal", lambda: 2)
    recorder = Recorder(monkeypatch, xla_model)
    for name in ("all_reduce", "collective_broadcast", "reduce_gradients", "broadcast_master_param"):
        recorder.answers(name, None)
    recorder.answers("all_gather", torch.tensor([0.0, 1.0, 2.0]))  # by ordinal
    return recorder


def test_what_is_gathered_is_in_the_order_of_ranks(xm: Recorder) -> None:
    assert XlaCollectives(Control()).all_gather(torch.zeros(1)).tolist() == [2.0, 0.0, 1.0]  # type: ignore[arg-type]


def test_a_rank_broadcasts_under_its_ordinal(xm: Recorder) -> None:
    tensor = torch.zeros(1)
    XlaCollectives(Control()).broadcast(tensor, 1)  # type: ignore[arg-type]

    assert xm.calls == [("collective_broadcast", ([tensor], 0))]


def test_a_mean_is_a_scaled_sum_in_place(xm: Recorder) -> None:
    tensor = torch.zeros(1)

    assert XlaCollectives(Control()).all_reduce(tensor, "mean") is tensor  # type: ignore[arg-type]
    assert xm.calls == [("all_reduce", ("sum", [tensor]))]


def test_weights_are_made_equal_and_gradients_averaged_before_they_are_divided(xm: Recorder) -> None:
    run: Any = SimpleNamespace(world=SimpleNamespace(size=3))
    plugin, model = XlaDataParallel(None, run), torch.nn.Linear(1, 1)
    unit: Any = SimpleNamespace(optimizers=["one", "other"])
    below = SimpleNamespace(reduce_gradients=lambda unit, items: xm.calls.append(("divide", (items,))))
    plugin.below = below

    assert plugin.wrap_model(unit, model) is model
    plugin.reduce_gradients(unit, None)

    averaged = [("reduce_gradients", ("one",)), ("reduce_gradients", ("other",))]
    assert xm.calls == [("broadcast_master_param", (model,)), *averaged, ("divide", (None,))]


@pytest.mark.parametrize(("devices", "replicas", "said"), [(2, 4, "xla-spmd"), (1, 1, "joins 1 of them")])
def test_a_world_that_xla_does_not_see_is_refused(devices: int, replicas: int, said: str) -> None:
    with pytest.raises(LaunchError, match=said):
        _require_replicas(SimpleNamespace(size=4), devices, replicas)  # type: ignore[arg-type]

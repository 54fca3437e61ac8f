"""What several processes ask of torch_xla: recorded, each call held against the installed signatures."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accel_core import LaunchError, World, notebook_launcher
from accel_core.config.resolve import load
from accel_core.plugins.discovery import discover
from accel_core.runtime.selection import choose
from accel_testing import Recorder
from accel_xla import machine
from accel_xla.communication import XlaCollectives
from accel_xla.data_parallel import XlaDataParallel
from accel_xla.device import XlaDevice, _require_replicas

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


def test_weights_are_made_equal_and_gradients_averaged(xm: Recorder) -> None:
    run: Any = SimpleNamespace(world=SimpleNamespace(size=3))
    plugin, model = XlaDataParallel(None, run), torch.nn.Linear(1, 1)
    unit: Any = SimpleNamespace(optimizers=["one", "other"])

    assert plugin.wrap_model(unit, model) is model
    plugin.reduce_gradients(unit)

    averaged = [("reduce_gradients", ("one",)), ("reduce_gradients", ("other",))]
    assert xm.calls == [("broadcast_master_param", (model,)), *averaged]


# -- the launcher --------------------------------------------------------------------------------


@pytest.fixture
def pjrt(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    from torch_xla._internal import pjrt

    recorder = Recorder(monkeypatch, pjrt)
    recorder.answers("initialize_multiprocess", None)
    recorder.answers("initialize_singleprocess", None)
    return recorder


def joined(monkeypatch: pytest.MonkeyPatch, world: World) -> XlaDevice:
    from torch_xla import runtime

    replicas = Recorder(monkeypatch, runtime)
    replicas.answers("addressable_device_count", 1)
    replicas.answers("world_size", world.size)
    run: Any = SimpleNamespace()
    device = XlaDevice(None, run)
    device._join(world)
    return device


def test_a_process_of_several_tells_torch_xla_its_place_on_the_host(
    pjrt: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined(monkeypatch, World(rank=5, size=8, local_rank=1, local_size=4))

    assert pjrt.calls == [("initialize_multiprocess", (1, 4))]


def test_a_process_alone_takes_one_device(pjrt: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    joined(monkeypatch, World())

    assert pjrt.calls == [("initialize_singleprocess", ())]


def launched() -> bool:
    return torch.distributed.is_torchelastic_launched()


def test_torch_xla_takes_cores_launcher_for_torchrun() -> None:
    """`torch_xla.launch` documents torchrun as one of its two launchers, and asks torch whether it was."""
    assert notebook_launcher(launched, num_processes=2, device="cpu") == [True, True]


@pytest.mark.parametrize("bounds", [None, "1,1,1", "2,1,1", "2,2,2"])
def test_processes_are_counted_as_torch_xla_counts_them(
    monkeypatch: pytest.MonkeyPatch, bounds: str | None
) -> None:
    from torch_xla._internal import tpu

    monkeypatch.setattr(tpu, "num_available_chips", lambda: 4)
    monkeypatch.setattr(machine, "_tpus", lambda: 4)
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    monkeypatch.delenv("TPU_PROCESS_BOUNDS", raising=False)
    if bounds is not None:
        monkeypatch.setenv("TPU_PROCESS_BOUNDS", bounds)

    assert machine.chip_count() == tpu.num_local_processes()


def test_a_run_of_several_processes_is_data_parallel_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = load(python={"device": "xla"}, discovery=discover(), environment={}, directory="/nonexistent")

    assert choose(resolved, 2, discover()).strategy.name == "xla-dp"


@pytest.mark.parametrize(("devices", "replicas", "said"), [(2, 4, "xla-spmd"), (1, 1, "joins 1 of them")])
def test_a_world_that_xla_does_not_see_is_refused(devices: int, replicas: int, said: str) -> None:
    with pytest.raises(LaunchError, match=said):
        _require_replicas(SimpleNamespace(size=4), devices, replicas)  # type: ignore[arg-type]

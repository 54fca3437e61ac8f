"""A checkpoint read, changed and written where there is no run."""

from __future__ import annotations

import diff_jobs as jobs
import pytest
import torch
from click.testing import CliRunner
from opened import rewrite

from accel_checkpoint_tools.contents import Contents, Source
from accel_core import Accelerator, CheckpointError, read_manifest, storage_at
from accel_core.cli.group import accel


@pytest.fixture
def saved(tmp_path):
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(3, 2)
    _, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.register_for_checkpointing(Large())
    yield accelerator, model, optimizer, accelerator.save_state(tmp_path / "here", step=7)
    accelerator.end_training()


class Large:
    """Too large for JSON, and nothing that JSON can say."""

    def __init__(self):
        self.state = {("a", 1): torch.arange(20_000.0), "inf": float("inf")}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        assert torch.equal(state["a", 1], torch.arange(20_000.0))
        assert state["inf"] == float("inf")


def test_what_is_changed_is_loaded_and_all_else_too(saved, tmp_path):
    accelerator, model, optimizer, folder = saved

    def change(contents):
        contents.tensors["unit0", "model/weight"] = Source.of(torch.ones(2, 3))
        contents.state["units"]["unit0"]["optimizers"][0]["groups"][0]["lr"] = 0.5

    rewrite(folder, tmp_path / "there", change)

    accelerator.load_state(tmp_path / "there")
    assert (model.weight == 1).all()
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert read_manifest(storage_at(tmp_path / "there")).members["step"] == 7


class Equal(torch.nn.Linear):
    """Compares as equal to any of its kind."""

    __hash__ = torch.nn.Linear.__hash__

    def __eq__(self, other):
        return isinstance(other, Equal)


def test_it_tells_what_was_prepared_in_its_order_and_of_equal_models_each_once(tmp_path):
    accelerator = Accelerator(cpu=True)
    models = Equal(3, 2), torch.nn.Linear(3, 2), Equal(3, 2)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1) for optimizer in optimizers]
    accelerator.prepare(*reversed(models), *optimizers, *schedulers)
    with Contents.open(accelerator.save_state(tmp_path / "here")) as contents:
        prepared = contents.state["prepared"]
    accelerator.end_training()

    assert len(set(map(tuple, prepared["models"]))) == len(prepared["models"]) == 3
    assert prepared["optimizers"] == prepared["schedulers"] == prepared["models"][::-1]


def test_the_order_has_an_optimizer_with_an_attribute_scheduler(tmp_path):
    accelerator, model = Accelerator(device="cpu"), torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    accelerator.prepare(model, optimizer)
    accelerator.save_state(tmp_path / "saved")
    accelerator.end_training()
    with Contents.open(tmp_path / "saved") as contents:
        order = contents.state["prepared"]
    assert [tuple(place) for place in order["optimizers"]] == [("unit0", 0)]


def test_a_checkpoint_is_replaced_and_anything_else_is_not(saved, tmp_path):
    accelerator, model, _, folder = saved
    rewrite(folder, tmp_path / "there", lambda contents: None)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").touch()

    def change(contents):
        contents.tensors["unit0", "model/weight"] = Source.of(torch.ones(2, 3))

    rewrite(folder, tmp_path / "there", change)

    with pytest.raises(CheckpointError, match="exists and is not a checkpoint"):
        rewrite(folder, tmp_path / "mine", change)
    accelerator.load_state(tmp_path / "there")
    assert (model.weight == 1).all()
    assert len([*(tmp_path / "there").iterdir()]) == 2, "one save and its manifest"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "mine", "there"]


def test_a_checkpoint_is_replaced_by_what_is_made_of_it(saved, tmp_path):
    accelerator, model, _, folder = saved

    def change(contents):
        contents.tensors["unit0", "model/bias"] = Source.of(torch.ones(2))

    rewrite(folder, folder, change)

    accelerator.load_state(folder)
    assert (model.bias == 1).all()


def test_what_is_no_plain_data_is_refused_by_its_path(saved, tmp_path):
    def change(contents):
        contents.state["registered"][0]["state"]["f"] = print

    with pytest.raises(CheckpointError, match=r"state\.registered\[0\]\.state.*cannot be stored"):
        rewrite(saved[-1], tmp_path / "there", change)

    assert [path.name for path in tmp_path.iterdir()] == ["here"]


@pytest.mark.needs("accel-fsdp")
def test_what_several_ranks_saved_stays_theirs(tmp_path, run_processes):
    run_processes(jobs.train, str(tmp_path), "fsdp", world=2)
    folder = tmp_path / "step3"

    rewrite(folder, tmp_path / "again", lambda contents: None)

    ended = CliRunner().invoke(accel, ["checkpoint", "diff", str(folder), str(tmp_path / "again")])
    assert ended.stdout == "no difference\n"
    with Contents.open(tmp_path / "again") as contents:
        assert len(contents.ranks) == 2

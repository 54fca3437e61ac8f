"""A plain FSDP 2 program changes one import; its checkpoints are whole, verified, and fit any world."""

from __future__ import annotations

import ast
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from front_door_job import main
from torch import nn

from accel_core import CheckpointError, DamagedError, Disk
from accel_core.storage import async_save, load, save, verify
from accel_testing import ProcessError


@pytest.fixture
def job(tmp_path, run_processes):
    """Run the program on so many ranks; return the weights that it ended with."""

    def call(action: str, ranks: int) -> list:
        place = tmp_path / "ck"
        run_processes(main, action, str(place), world=ranks)
        found: list = ast.literal_eval(Path(f"{place}.{action}.txt").read_text())
        return found

    return call


def close(found: list, expected: list) -> bool:
    """Compare nested lists of numbers; ranks sum gradients in another order."""
    pairs = zip(found, expected, strict=True)
    return all(torch.allclose(torch.tensor(a), torch.tensor(b), atol=1e-6) for a, b in pairs)


def test_what_4_ranks_saved_in_the_background_2_ranks_and_1_go_on_from(job, tmp_path):
    expected = job("async", 4)  # has trained one step more than it saved
    for ranks in (2, 1):
        assert close(job("load", ranks), expected)
    verify(tmp_path / "ck")


def test_a_save_that_is_killed_before_its_commit_leaves_the_one_before(job):
    with pytest.raises(ProcessError):
        job("die", 2)
    assert job("load", 1)


def test_one_process_gets_back_what_it_saved(tmp_path):
    model = nn.Linear(2, 2)
    state = {"model": model.state_dict(), "rates": [0.1, (0.2, None)], "moments": [{"m": torch.ones(3)}]}
    save(state, checkpoint_id=tmp_path / "ck")
    empty = {
        "model": {name: torch.zeros_like(each) for name, each in model.state_dict().items()},
        "rates": None,
        "moments": [{"m": torch.zeros(3)}],
    }
    filled = empty["moments"][0]["m"]
    load(empty, checkpoint_id=tmp_path / "ck")
    assert torch.equal(empty["model"]["weight"], model.weight)
    assert empty["rates"] == [0.1, (0.2, None)]
    assert filled.tolist() == [1.0, 1.0, 1.0]  # in place


def test_objects_with_a_state_dict_are_saved_and_loaded(tmp_path):
    schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.ones(1)], lr=1.0), 1)
    schedule.last_epoch = 5
    save({"schedule": schedule}, checkpoint_id=tmp_path / "ck")
    schedule.last_epoch = 0
    load({"schedule": schedule}, checkpoint_id=tmp_path / "ck")
    assert schedule.last_epoch == 5


def test_async_save_writes_a_copy_and_its_future_is_done_when_it_is_committed(tmp_path):
    tensor = torch.ones(4)
    future = async_save({"t": tensor}, checkpoint_id=tmp_path / "ck")
    tensor.zero_()
    assert future.result(60) is None
    load(state := {"t": torch.zeros(4)}, checkpoint_id=tmp_path / "ck")
    assert state["t"].tolist() == [1.0] * 4


def test_a_state_that_does_not_fit_is_refused_before_anything_is_changed(tmp_path):
    save({"a": torch.ones(2), "b": torch.ones(2), "n": 1}, checkpoint_id=tmp_path / "ck")
    state = {"a": torch.zeros(2), "b": torch.zeros(3), "c": torch.zeros(1), "m": 0}
    with pytest.raises(CheckpointError) as caught:
        load(state, checkpoint_id=tmp_path / "ck")
    assert "b: [2] was saved, and the state has [3]" in str(caught.value)
    assert "c: the checkpoint has no such tensor" in str(caught.value)
    assert "m: the checkpoint has no such value" in str(caught.value)
    assert state["a"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("state", [{"a/b": 1, "a": {"b": 2}}, {1: 1, "1": 2}])
def test_two_values_of_one_key_are_refused(tmp_path, state):
    with pytest.raises(CheckpointError, match="two values of the state have the key"):
        save(state, checkpoint_id=tmp_path / "ck")


def test_verify_names_the_damaged_file(tmp_path):
    save({"a": torch.ones(2)}, checkpoint_id=tmp_path / "ck")
    (data,) = (tmp_path / "ck").glob("save-*/rank-00000.safetensors")
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    with pytest.raises(DamagedError, match=r"rank-00000\.safetensors"):
        verify(tmp_path / "ck")
    with pytest.raises(DamagedError, match=r"rank-00000\.safetensors"):
        load({"a": torch.zeros(2)}, checkpoint_id=tmp_path / "ck")


def test_what_torch_takes_beside_is_refused_by_name_unless_it_is_none(tmp_path):
    save(OrderedDict(a=torch.ones(1)), checkpoint_id=Disk(tmp_path / "ck"), planner=None, storage_writer=None)
    with pytest.raises(TypeError, match="planner is torch"):
        save({}, checkpoint_id=tmp_path / "other", planner=object())
    with pytest.raises(TypeError, match="no argument 'plannr'"):
        save({}, checkpoint_id=tmp_path / "other", plannr=None)
    with pytest.raises(CheckpointError, match="is a URL"):
        save({}, checkpoint_id="s3://bucket/ck")


def test_a_folder_without_a_checkpoint_says_so(tmp_path):
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        load({}, checkpoint_id=tmp_path / "nothing")

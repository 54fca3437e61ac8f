"""Saving while training goes on: a snapshot of the moment, one save at a time, and no failure unheard."""

from __future__ import annotations

import gc
import sys

import async_job
import pytest
import torch
from exit_job import at_exit
from lookup import manifest_in

from accel_core import CheckpointError
from accel_core.storage import pending
from accel_core.storage.commit import read_manifest
from accel_core.storage.disk import Disk
from accel_core.storage.tensor_bytes import bytes_of


@pytest.fixture
def job():
    made = async_job.Job()
    yield made
    made.accelerator.end_training()


def run(run_processes, function, folder, *args, world=2):
    return run_processes(function, str(folder), *args, world=world, timeout=60)


def test_what_is_saved_is_the_state_of_the_moment(job, tmp_path):
    job.set(1.0)
    with async_job.writers_wait():
        job.accelerator.save_state(tmp_path / "here", wait=False)
        job.set(2.0)
    job.accelerator.wait_for_checkpoint()
    job.accelerator.load_state(tmp_path / "here")
    assert job.value() == 1.0


def test_nothing_is_there_until_it_is_whole(job, tmp_path):
    with async_job.writers_wait():
        job.accelerator.save_state(tmp_path / "here", wait=False)
        with pytest.raises(CheckpointError, match="is not a checkpoint"):
            read_manifest(Disk(tmp_path / "here"))
    job.accelerator.wait_for_checkpoint()
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


def test_the_next_save_waits_for_the_one_before(job, tmp_path):
    job.set(1.0)
    with async_job.writers_wait() as gate:
        job.accelerator.save_state(tmp_path / "one", wait=False)
        job.set(2.0)
        async_job.threading.Timer(0.2, gate.set).start()
        job.accelerator.save_state(tmp_path / "two", wait=False)
        assert read_manifest(Disk(tmp_path / "one"))
    job.accelerator.wait_for_checkpoint()
    for name, value in [("one", 1.0), ("two", 2.0)]:
        job.accelerator.load_state(tmp_path / name)
        assert job.value() == value


@pytest.mark.parametrize("call", ["save_state", "wait_for_checkpoint", "end_training"])
def test_what_went_wrong_is_raised_once(tmp_path, monkeypatch, call):
    job = async_job.Job()
    monkeypatch.setattr(pending, "write_file", async_job.full)
    job.accelerator.save_state(tmp_path / "here", wait=False)
    act = getattr(job.accelerator, call)
    arguments = [tmp_path / "here"] if call == "save_state" else []
    with pytest.raises(CheckpointError, match=r"here failed.*\nrank 0: OSError: \[Errno 28\]") as raised:
        act(*arguments)
    assert isinstance(raised.value.__cause__, OSError)
    monkeypatch.undo()
    act(*arguments)
    job.accelerator.end_training()


def test_those_who_follow_checkpoints_are_told_of_committed_ones(job, tmp_path, monkeypatch):
    told = []
    hooks = job.accelerator.run.hooks
    monkeypatch.setattr(hooks, "checkpoint_committed", lambda *said: told.append(said), raising=False)
    job.accelerator.save_state(tmp_path / "one", step=1)
    assert told == [(tmp_path / "one", 1)]
    job.accelerator.save_state(tmp_path / "two", step=2, wait=False)
    assert told == [(tmp_path / "one", 1)]
    job.accelerator.wait_for_checkpoint()
    assert told[1:] == [(tmp_path / "two", 2)]


def test_the_copy_is_made_in_the_same_place_again(job, tmp_path):
    job.accelerator.save_state(tmp_path / "here", wait=False)
    layout = job.accelerator.run.checkpoints._saver._layout
    place = layout._buffer.data_ptr()
    job.accelerator.save_state(tmp_path / "here", wait=False)
    job.accelerator.save_state(tmp_path / "here")
    assert job.accelerator.run.checkpoints._saver._layout is layout
    assert layout._buffer.data_ptr() == place


def test_a_save_keeps_no_object_for_each_small_tensor(tmp_path):
    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())

    accelerator = async_job.Accelerator(device="cpu")
    accelerator.prepare(torch.nn.ParameterList(torch.zeros(8) for _ in range(1000)))
    before = tensors()
    accelerator.save_state(tmp_path / "here", wait=False)
    accelerator.wait_for_checkpoint()
    assert tensors() - before < 100
    accelerator.end_training()


@pytest.mark.parametrize("dtype", [torch.complex64, torch.bfloat16, torch.bool, torch.float8_e5m2], ids=str)
def test_any_tensor_is_copied(tmp_path, dtype):
    accelerator = async_job.Accelerator(device="cpu")
    module = torch.nn.Module()
    shapes = [(), (0, 3), (5,), (2, 3)]
    for number, shape in enumerate(shapes):
        module.register_buffer(f"b{number}", torch.randint(0, 2, shape).to(dtype))
    module.register_buffer("strided", torch.randint(0, 2, (4, 4)).to(dtype).t()[1:, ::2])
    accelerator.prepare(module)
    expected = {name: value.clone() for name, value in module.state_dict().items()}
    accelerator.save_state(tmp_path / "here", wait=False)
    accelerator.wait_for_checkpoint()
    for value in module.buffers():
        value.zero_()
    accelerator.load_state(tmp_path / "here")
    for name, value in module.state_dict().items():
        assert bytes_of(value) == bytes_of(expected[name])
    accelerator.end_training()


def test_a_script_that_ends_waits_for_its_last_save(tmp_path, run_command):
    slow = "async_job.pending.write_file = async_job.slow"
    ended = at_exit(run_command, tmp_path, slow)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "here"]


@pytest.mark.full
def test_a_script_that_fails_does_too(tmp_path, run_command):
    ended = at_exit(run_command, tmp_path, last="raise SystemError('oh')")
    assert ended.returncode == 1
    assert manifest_in(tmp_path / "here").exists()


@pytest.mark.full
def test_a_script_whose_last_save_failed_has_failed(tmp_path, run_command):
    ended = at_exit(run_command, tmp_path, "async_job.pending.write_file = async_job.full")
    assert ended.returncode == 1
    assert "rank 0: OSError: [Errno 28] No space left on device" in ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["first"]


@pytest.mark.full
def test_a_lost_save_fails_a_script_of_which_something_else_cannot_end_either(tmp_path, run_command):
    trouble = (
        "async_job.pending.write_file = async_job.full; job.accelerator.run._leave_world = lambda: 1 / 0"
    )
    ended = at_exit(run_command, tmp_path, trouble)
    assert ended.returncode == 1
    assert "No space left on device" in ended.stderr
    assert "ZeroDivisionError" in ended.stderr


@pytest.mark.full
def test_a_copy_is_all_the_memory_it_takes(tmp_path, run_processes):
    ((waiting, first, second),) = run(run_processes, async_job.memory, tmp_path, world=1)
    assert waiting < 0.2
    assert first < 1.2
    assert second < 0.1


@pytest.mark.skipif(sys.platform != "linux", reason="mounts a small disk")
@pytest.mark.parametrize("wait", [True, False])
def test_a_full_disk_costs_that_save_only(tmp_path, wait, run_processes):
    (found,) = run(run_processes, async_job.disk_full, tmp_path, wait, world=1)
    if not found:
        pytest.skip("this user may not mount a disk")
    said, left, value = found
    assert "No space left on device" in said
    assert (left, value) == (["here"], [1.0])


# -- several ranks -------------------------------------------------------------------------------


@pytest.mark.needs("accel-ddp")
@pytest.mark.parametrize("how", ["wait", "next", "ask", "end"])
def test_what_failed_on_one_rank_is_told_on_all(tmp_path, how, run_processes):
    for said, *_, left in run(run_processes, async_job.one_fails, tmp_path, how):
        assert "rank 1: OSError: [Errno 28] No space left on device" in said
        assert "rank 0" not in said
        assert left == "here"


@pytest.mark.full
@pytest.mark.needs("accel-ddp")
def test_a_rank_that_died_is_named(tmp_path, run_processes):
    ((said, left),) = run(run_processes, async_job.one_dies, tmp_path, world=1)
    assert "rank 1: no vote within 3 s; it died or hangs" in said
    assert left == ["here", "said"]


@pytest.mark.needs("accel-ddp")
def test_only_a_new_layout_is_planned_and_by_all_ranks(tmp_path, run_processes):
    for found in run(run_processes, async_job.plans, tmp_path):
        assert found[:4] == [1, 1, 2, 2]
        assert "optimizer/0.weight/exp_avg: its parts have several dtypes, float32, float64" in found[4]


@pytest.mark.needs("accel-ddp")
def test_votes_are_small_and_leave_nothing_in_the_store(tmp_path, run_processes):
    for left, largest in run(run_processes, async_job.pair_saves, tmp_path, 3):
        assert left == 0
        assert largest < 1024


@pytest.mark.needs("accel-ddp")
def test_a_terminal_shows_how_much_of_a_save_is_written_while_it_is_waited_for(tmp_path, run_processes):
    first, second = run(run_processes, async_job.waited_for_on_a_terminal, tmp_path)
    assert "accel: writing here: " in first
    assert first.endswith(" \r")  # wiped at the end
    assert second == ""

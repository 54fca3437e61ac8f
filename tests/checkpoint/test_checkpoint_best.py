"""The best checkpoint by a metric stays, and can be loaded; the metric is never guessed."""

from __future__ import annotations

import math
import os
import signal
import time

import pytest
import torch
from lookup import members_of
from series_job import Job

from accel_core import CheckpointError, ConfigError, ProjectConfiguration
from accel_testing.processes import ProcessError


def saved(job, *values, name="val_loss"):
    for number, value in enumerate(values):
        with torch.no_grad():
            job.module.weight.fill_(number)
        job.accelerator.save_state(metrics={name: value})


def left(folder):
    return sorted(int(path.name.rpartition("_")[2]) for path in (folder / "checkpoints").iterdir())


@pytest.fixture
def job(tmp_path):
    jobs = []

    def make(keep_best="val_loss", total_limit=1, **options):
        jobs.append(Job(tmp_path, keep_best=keep_best, total_limit=total_limit, **options))
        return jobs[-1]

    yield make
    for each in jobs:
        each.accelerator.end_training()


@pytest.mark.parametrize(
    ("keep_best", "name", "best"),
    [("val_loss", "val_loss", 1), ("min:wer", "wer", 1), ("max:accuracy", "accuracy", 2)],
)
def test_the_best_stays_beside_the_newest(job, tmp_path, keep_best, name, best):
    saved(job(keep_best), 0.7, 0.3, 0.9, 0.5, name=name)

    assert left(tmp_path) == [best, 3]


def test_an_older_best_goes_once_there_is_a_better_one(job, tmp_path):
    saved(job(), 0.7, 0.3, 0.9, 0.1, 0.4)

    assert left(tmp_path) == [3, 4]


def test_nan_is_never_the_best(job, tmp_path):
    saved(job(), math.nan, 0.8, math.nan, math.inf)

    assert left(tmp_path) == [1, 3]


def test_of_equal_ones_the_earliest_stays(job, tmp_path):
    saved(job(), 0.5, torch.tensor(0.5), 0.5)

    assert left(tmp_path) == [0, 2]


def test_the_best_is_known_after_a_restart(job, tmp_path):
    saved(job(), 0.7, 0.3, 0.9)
    resumed = job()
    assert resumed.load() == 2

    saved(resumed, 0.8, 0.6)

    assert left(tmp_path) == [1, 4]


def test_the_best_is_loaded(job):
    saved(job(total_limit=2), 0.7, 0.3, 0.9, 0.8)

    assert job(total_limit=2).load(best=True) == 1


def test_the_best_may_be_of_the_run_that_led_to_this_one(job):
    saved(job(), 0.7, 0.3, 0.9)
    resumed = job()
    resumed.load()
    saved(resumed, 0.8)

    assert resumed.load(best=True) == 1


def test_a_missing_metric_is_an_error_that_names_it(job, tmp_path):
    with pytest.raises(CheckpointError, match=r"'val_loss', which is not among the metrics \(accuracy\)"):
        job().accelerator.save_state(metrics={"accuracy": 0.5})

    assert not (tmp_path / "checkpoints").exists()


def test_a_step_may_be_a_tensor(job):
    folder = job().accelerator.save_state(step=torch.tensor(3), metrics={"val_loss": 1})

    assert members_of(folder)["step"] == 3


def test_a_name_of_ones_own_needs_no_metric(job, tmp_path):
    assert job().save(1.0, tmp_path / "mine").name == "mine"


def test_a_save_on_preemption_is_made_and_never_the_best(job, tmp_path):
    run = job()
    saved(run, 0.7)
    assert not run.accelerator.save_on_preemption()
    os.kill(os.getpid(), signal.SIGTERM)
    while not run.accelerator.save_on_preemption():  # a thread tells of the signal
        time.sleep(0.01)
    saved(run, 0.9)

    assert left(tmp_path) == [0, 2]


@pytest.mark.parametrize("keep_best", ["accuracy", "best:accuracy", "max:", "", 3, ["loss"]])
def test_a_metric_without_a_direction_is_refused(keep_best):
    with pytest.raises((ConfigError, ValueError), match="does not say which value is the best; write 'max:"):
        ProjectConfiguration(automatic_checkpoint_naming=True, keep_best=keep_best)


def test_the_best_without_keep_best_is_an_error(job):
    with pytest.raises(CheckpointError, match=r"goes by project.keep_best.*\nset project.keep_best"):
        job(keep_best=None).accelerator.load_state(best=True)


def test_no_checkpoint_with_the_metric_is_an_error_that_names_it(job):
    job(keep_best=None).save(1.0)

    with pytest.raises(CheckpointError, match="there is no checkpoint with a value of 'val_loss' in "):
        job().accelerator.load_state(best=True)


def test_missing_ok_does_not_begin_anew_beside_checkpoints_that_nothing_measured(job):
    job(keep_best=None).save(1.0)

    with pytest.raises(CheckpointError, match=r"a value of 'val_loss' in .*\nto take the newest, load_state"):
        job().accelerator.load_state(best=True, missing_ok=True)


def test_missing_ok_begins_anew_where_there_is_none(job):
    assert job().accelerator.load_state(best=True, missing_ok=True) is None


def test_a_name_may_have_a_colon(job, tmp_path):
    saved(job("max:top:1"), 0.7, 0.9, 0.3, name="top:1")

    assert left(tmp_path) == [1, 2]


def save_on_two(folder, values):
    accelerator = Job(folder, keep_best="val_loss", total_limit=1).accelerator
    for both in values:
        accelerator.save_state(metrics={"val_loss": both[accelerator.process_index]})
    accelerator.end_training()


@pytest.mark.needs("accel-ddp")
def test_two_ranks_keep_the_same(tmp_path, run_processes):
    run_processes(save_on_two, str(tmp_path), [(0.7, 0.7), (0.3, 0.3), (0.9, 0.9), (math.nan, math.nan)])

    assert left(tmp_path) == [1, 3]


@pytest.mark.needs("accel-ddp")
def test_ranks_that_measured_otherwise_are_told(tmp_path, run_processes):
    with pytest.raises(ProcessError, match=r"rank 0 has the metrics .*0.7.*, rank 1 has .*0.6"):
        run_processes(save_on_two, str(tmp_path), [(0.7, 0.6)])

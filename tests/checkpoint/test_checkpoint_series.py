"""Numbered checkpoints: which is next, which is loaded, and which may go; and what is nobody's business."""

from __future__ import annotations

import datetime as dt
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import series_job
from lookup import file_in, manifest_in, members_of
from series_job import Job

from accel_core import Accelerator, ProjectConfiguration
from accel_core.errors import CheckpointError
from accel_core.storage import commit, disk
from accel_core.storage.series import Series
from accel_testing.patience import patience


@pytest.fixture
def job(tmp_path, request):
    jobs = []

    def make(folder=tmp_path, **options):
        jobs.append(Job(folder, **options))
        return jobs[-1]

    yield make
    for each in jobs:
        each.accelerator.end_training()


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


# -- naming --------------------------------------------------------------------------------------


def test_saves_are_numbered_and_the_newest_is_loaded(job, folder):
    first = job()
    assert [first.save(value) for value in (5, 6)] == [folder / "checkpoint_0", folder / "checkpoint_1"]
    assert first.accelerator.save_iteration == 2
    second = job()
    assert second.load() == 6
    assert second.loaded == folder / "checkpoint_1"


def test_numbers_go_on_after_a_resume(job, folder):
    job().save(1)
    second = job()
    second.load()
    assert second.accelerator.save_iteration == 1
    assert second.save(2) == folder / "checkpoint_1"


def test_numbers_start_where_the_project_says(job, folder):
    assert job(iteration=7).save(1) == folder / "checkpoint_7"


def test_ten_comes_after_nine(job, folder):
    first = job(iteration=9)
    first.save(9)
    first.save(10)
    assert job().load() == 10


def test_a_directory_that_is_given_wins_over_the_numbers_and_counts_as_a_save(job, folder, tmp_path):
    first = job()
    assert first.save(1, tmp_path / "best") == tmp_path / "best"
    assert first.save(2) == folder / "checkpoint_1"
    assert first.load(tmp_path / "best") == 1
    assert first.save(3) == folder / "checkpoint_2"


def test_going_back_to_an_older_one_leaves_the_newer_and_the_next_is_newer_still(job, folder):
    first = job()
    for value in range(3):
        first.save(value)
    second = job(total_limit=2)
    assert second.load(folder / "checkpoint_0") == 0
    assert second.save(10) == folder / "checkpoint_3"
    assert second.save(11) == folder / "checkpoint_4"
    assert names(folder) == ["checkpoint_1", "checkpoint_2", "checkpoint_3", "checkpoint_4"]
    assert job().load() == 11


def test_the_clock_has_no_say(job, folder, monkeypatch):
    first = job()
    first.save(1)
    first.save(2)
    for age, path in enumerate([folder / "checkpoint_1", folder / "checkpoint_0"]):
        os.utime(manifest_in(path), (2e9 - 1e9 * age, 1e9 * age))
        os.utime(path, (2e9 - 1e9 * age, 1e9 * age))
    assert job().load() == 2

    class Backwards(dt.datetime):
        @classmethod
        def now(cls, zone):
            return cls(1999, 1, 1, tzinfo=zone)

    monkeypatch.setattr(dt, "datetime", Backwards)
    third = job(total_limit=2)
    third.load()
    third.save(3)
    assert members_of(folder / "checkpoint_2")["time"].startswith("1999")
    assert names(folder) == ["checkpoint_1", "checkpoint_2"]
    assert job().load() == 3


def test_the_project_is_the_current_folder_if_none_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = ProjectConfiguration(automatic_checkpoint_naming=True)
    accelerator = Accelerator(device="cpu", project_config=config)
    assert accelerator.save_state() == tmp_path / "checkpoints" / "checkpoint_0"
    accelerator.end_training()


def test_the_folder_given_to_the_accelerator_is_that_of_the_logs_too(tmp_path):
    config = ProjectConfiguration(total_limit=3)
    accelerator = Accelerator(device="cpu", project_dir=tmp_path, project_config=config)
    assert accelerator.project_dir == accelerator.logging_dir == str(tmp_path)
    assert accelerator.project_configuration.total_limit == 3
    accelerator.end_training()


def test_a_save_that_is_under_way_is_waited_for_before_loading(job, folder):
    first = job(total_limit=1)
    first.save(1)
    first.accelerator.save_state(wait=False)
    assert first.load() == 1
    assert first.loaded == folder / "checkpoint_1"
    first.save(2)
    assert names(folder) == ["checkpoint_2"]


# -- which one is loaded -------------------------------------------------------------------------


def test_without_any_the_error_says_how_to_start_without(job, tmp_path):
    with pytest.raises(CheckpointError, match=r"there is no checkpoint in .*\n.*missing_ok=True"):
        job().load()
    assert job().load(missing_ok=True) == -1
    assert job().load(tmp_path / "nothing", missing_ok=True) == -1


def test_without_naming_the_error_says_both_ways(tmp_path):
    accelerator = Accelerator(device="cpu", project_dir=tmp_path)
    for method in (accelerator.save_state, accelerator.load_state):
        with pytest.raises(CheckpointError, match="automatic_checkpoint_naming"):
            method()
    accelerator.end_training()


@pytest.mark.parametrize("file", ["manifest.json", "state.json", "rank-00000.json", "rank-00000.safetensors"])
@pytest.mark.parametrize("how", ["flipped", "deleted", "truncated"])
def test_what_is_damaged_is_named_and_the_one_before_is_loaded(job, folder, caplog, file, how):
    first = job()
    first.save(1)
    first.save(2)
    path = file_in(folder / "checkpoint_1", file)
    if how == "flipped":
        flip(path)
    elif how == "deleted":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-3])
    assert job().load() == 1
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("passed over: ")
    assert str(folder / "checkpoint_1") in said
    assert path.name in said or how == "deleted"


def test_if_all_are_damaged_nothing_is_loaded_and_nothing_is_started_anew(job, folder):
    job().save(1)
    flip(file_in(folder / "checkpoint_0", "state.json"))
    for missing_ok in (False, True):
        with pytest.raises(CheckpointError, match="none of the 1 checkpoints in .* can be loaded"):
            job().load(missing_ok=missing_ok)


def test_a_damaged_one_is_neither_overwritten_nor_counted_nor_removed(job, folder):
    first = job()
    for value in (0, 1):
        first.save(value)
    flip(file_in(folder / "checkpoint_1", "rank-00000.safetensors"))
    second = job(total_limit=1)
    second.load()
    assert second.save(2) == folder / "checkpoint_2"
    assert names(folder) == ["checkpoint_1", "checkpoint_2"]


# -- foreign folders -----------------------------------------------------------------------------

FOREIGN = [
    "best_model",
    "2020_best",
    "run2026_backup",
    "checkpoint_99_old",
    "checkpoint_007",
    "checkpoint-50",
]


def test_foreign_folders_are_never_picked_and_never_removed(job, folder):
    first = job(total_limit=1)
    first.save(1)
    for name in FOREIGN:
        shutil.copytree(folder / "checkpoint_0", folder / name)
    (folder / "notes.txt").write_text("mine")
    for value in (2, 3):
        first.save(value)
    assert names(folder) == sorted(["checkpoint_2", "notes.txt", *FOREIGN])
    assert job().load() == 3


def test_a_copy_under_a_number_that_was_not_its_own_is_foreign_too(job, folder, caplog):
    first = job(total_limit=1)
    first.save(1)
    shutil.copytree(folder / "checkpoint_0", folder / "checkpoint_50")
    assert job().load() == 1
    assert "checkpoint_50 holds no whole save of this number" in caplog.text
    second = job(total_limit=1)
    second.load()
    second.save(2)
    assert names(folder) == ["checkpoint_50", "checkpoint_51"]


def test_two_that_changed_places_are_passed_over(job, folder, caplog):
    first = job()
    for value in range(3):
        first.save(value)
    (folder / "checkpoint_1").rename(folder / "aside")
    (folder / "checkpoint_2").rename(folder / "checkpoint_1")
    (folder / "aside").rename(folder / "checkpoint_2")
    assert job().load() == 0
    assert caplog.text.count("holds no whole save of this number") == 2


def test_what_has_taken_the_place_of_a_checkpoint_is_not_removed(job, folder, tmp_path):
    first = job(total_limit=1)
    first.save(1)
    shutil.rmtree(folder / "checkpoint_0")
    (folder / "checkpoint_0").mkdir()
    (folder / "checkpoint_0" / "mine").touch()
    first.save(2)
    moved = folder / "checkpoint_1"
    moved.rename(tmp_path / "elsewhere")
    moved.symlink_to(tmp_path / "elsewhere")
    first.save(3)
    assert names(folder) == ["checkpoint_0", "checkpoint_1", "checkpoint_2"]
    assert moved.is_symlink()
    assert manifest_in(tmp_path / "elsewhere").exists()


# -- retention -----------------------------------------------------------------------------------


def test_the_oldest_go_and_the_limit_stays_also_after_a_resume(job, folder):
    first = job(total_limit=2)
    for value in range(3):
        first.save(value)
    assert names(folder) == ["checkpoint_1", "checkpoint_2"]
    second = job(total_limit=2)
    second.load()
    second.save(3)
    assert names(folder) == ["checkpoint_2", "checkpoint_3"]


def test_what_was_saved_after_the_one_that_is_loaded_counts_as_well(job, folder, caplog):
    run = job(total_limit=2)
    for value in range(3):
        run.save(value)
    run.load(folder / "checkpoint_1")
    run.save(3)
    assert names(folder) == ["checkpoint_2", "checkpoint_3"]
    assert "neither wrote nor resumed from" not in caplog.text


def test_the_limit_holds_over_a_chain_of_jobs_with_ids_of_their_own(tmp_path, folder, run_processes):
    for number in range(4):
        environment = {"TORCHELASTIC_RUN_ID": f"job-{number}"}
        run_processes(resume_and_save, str(tmp_path), world=1, environment=environment)
    assert names(folder) == ["checkpoint_2", "checkpoint_3"]
    lineage = members_of(folder / "checkpoint_3")["lineage"]
    assert lineage == [f"job-{number}" for number in range(4)]


def resume_and_save(folder):
    # A launcher's variables: without them there is no launcher's id.
    job = Job(folder, total_limit=2)
    job.load(missing_ok=True)
    job.save(1)
    job.accelerator.end_training()


def test_the_old_one_stays_until_the_new_one_is_complete(job, folder, monkeypatch):
    first = job(total_limit=1)
    first.save(1)

    def full(*_, **__):
        assert names(folder)[0] == "checkpoint_0"
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(commit, "manifest_of", full)
    with pytest.raises(CheckpointError, match="No space left"):
        first.save(2)
    assert names(folder) == ["checkpoint_0"]
    monkeypatch.undo()
    assert job().load() == 1


def test_what_cannot_be_removed_is_logged_and_the_save_stands(job, folder, monkeypatch, caplog):
    first = job(total_limit=1)
    first.save(1)

    def denied(path, names):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(disk.Disk, "remove", denied)
    first.save(2)
    assert "checkpoint_0 could not be removed" in caplog.text
    assert "Permission denied" in caplog.text
    monkeypatch.undo()
    first.save(3)
    first.save(4)
    assert names(folder) == ["checkpoint_3"], "a later save removes it"


def test_what_no_save_wrote_stays_when_a_numbered_checkpoint_is_removed(job, folder, caplog):
    first = job(total_limit=1)
    first.save(1)
    (folder / "checkpoint_0" / "tokenizer.json").write_text("words")
    first.save(2)
    assert names(folder) == ["checkpoint_0", "checkpoint_1"]
    assert names(folder / "checkpoint_0") == ["tokenizer.json"]
    assert "removed by total_limit; tokenizer.json, not part of it, stays" in caplog.text
    assert job().load() == 2


@pytest.mark.needs("accel-ddp")
@pytest.mark.parametrize("world", [1, 2])
def test_all_ranks_save_one_checkpoint_and_one_rank_removes(tmp_path, world, run_processes):
    found = run_processes(series_job.save_and_load, str(tmp_path), 4, 2, world=world)
    assert found == [(["checkpoint_2", "checkpoint_3"], 3.0, 4)] * world


# -- two runs in one folder ----------------------------------------------------------------------


def test_two_runs_in_one_folder_keep_each_others(job, folder, caplog):
    first, second = job(total_limit=2), job(total_limit=1)
    first.save(1)
    second.save(2)
    assert "checkpoints that this run neither wrote nor resumed from; they stay" in caplog.text
    first.save(3)
    second.save(4)
    second.save(5)
    assert names(folder) == ["checkpoint_0", "checkpoint_2", "checkpoint_4"]
    assert first.load() == 3, "a run that is still there knows its own"
    assert second.load() == 5


def test_whoever_resumes_one_of_two_runs_removes_nothing_of_the_other(job, folder):
    job().save(1)
    job().save(2)
    third = job(total_limit=1)
    assert third.load() == 2
    third.save(3)
    assert names(folder) == ["checkpoint_0", "checkpoint_2"]


def test_a_stranger_takes_the_newest_and_is_told_that_there_are_several_runs(job, folder, caplog):
    job().save(1)
    job().save(2)
    caplog.clear()
    assert job().load() == 2
    assert "checkpoints of several runs; the newest, checkpoint_1, is taken" in caplog.text
    assert "checkpoint_0 is of another run" in caplog.text


def test_two_that_went_on_from_one_checkpoint_keep_each_others(job, folder):
    job().save(0)
    first, second = job(total_limit=2), job(total_limit=2)
    for each in (first, second):
        each.load()
    first.save(1)
    second.save(2)
    first.save(3)
    second.save(4)
    assert names(folder) == ["checkpoint_1", "checkpoint_2", "checkpoint_3", "checkpoint_4"]


def test_a_number_that_was_taken_meanwhile_is_not_overwritten(job, folder, monkeypatch):
    first, second = job(), job()
    first.save(1)
    monkeypatch.setattr(Series, "free_number", lambda series: 0)
    with pytest.raises(CheckpointError, match="has appeared while this save was written: another run saves"):
        second.save(2)
    assert names(folder) == ["checkpoint_0"]
    assert job().load() == 1


# -- leftovers -----------------------------------------------------------------------------------

DIES = """
import os, sys, signal
sys.path.insert(0, {tests!r})
from accel_core.storage import {module} as module
from series_job import Job
job = Job({folder!r})
job.load(missing_ok=True)
module.{where} = lambda *_, **__: os.kill(os.getpid(), signal.SIG{how})
print("ready", flush=True)
job.save(9)
"""


def dying(start_command, folder, where, how="KILL"):
    module, name = where.split(".")
    tests = str(Path(__file__).parent)
    text = DIES.format(tests=tests, folder=str(folder), module=module, where=name, how=how)
    return start_command([sys.executable, "-c", text], stdout=subprocess.PIPE)


@pytest.mark.parametrize("where", ["commit.manifest_of", "pending.commit"])
@pytest.mark.by_default
def test_what_a_killed_save_left_is_removed_by_the_next_of_any_run(
    job, tmp_path, folder, where, start_command
):
    job().save(1)
    with dying(start_command, tmp_path, where) as process:
        process.wait(patience(60))
    assert len(names(folder)) == 2
    assert job().load() == 1
    job().save(2)
    assert names(folder) == ["checkpoint_0", "checkpoint_1"]


def test_what_a_living_process_of_the_same_run_writes_is_not_touched(job, tmp_path, folder, start_command):
    job().save(1)
    with dying(start_command, tmp_path, "commit.manifest_of", "STOP") as process:
        try:
            wait_for(folder, 2)
            second = job()
            second.load()  # from here on both have one run id
            assert second.save(2) == folder / "checkpoint_2"
            assert len(names(folder)) == 3
        finally:
            process.kill()
    second.save(3)
    assert names(folder) == ["checkpoint_0", "checkpoint_2", "checkpoint_3"]


def wait_for(folder, count):
    deadline = time.monotonic() + patience(60)
    while len(names(folder)) < count and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.3)


def test_a_limit_that_counts_nothing_is_said_once(tmp_path, capsys):
    accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(total_limit=2))
    for name in ("a", "b", "c"):
        accelerator.save_state(tmp_path / name)
    accelerator.end_training()
    (said,) = capsys.readouterr().err.splitlines()
    assert "project.total_limit (ProjectConfiguration(...)) does nothing here" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]

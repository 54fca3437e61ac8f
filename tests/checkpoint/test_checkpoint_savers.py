"""Several savers beside each other, whatever ids they have; and what else lies in a checkpoint's folder."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import pytest
from saver_job import Saver

from accel_core.checkpoint import commit, pending_save
from accel_core.checkpoint.contents import CheckpointContents
from accel_core.errors import CheckpointError
from accel_testing.patience import patience


def value_in(folder):
    (leaf,) = CheckpointContents.read(folder).leaves.values()
    return leaf.shards[0][1].item()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def savers(monkeypatch):
    """Two runs of one process, both with the id that a launcher has given."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "ACCEL_RUN_ID": "job"}.items():
        monkeypatch.setenv(name, value)
    made = Saver(), Saver()
    yield made
    for each in made:
        each.accelerator.end_training()


@pytest.fixture
def saver():
    made = Saver()
    yield made
    made.accelerator.end_training()


@pytest.fixture
def held(monkeypatch):
    """Saves stand still before they write, until this is set."""
    event, begun, write = threading.Event(), threading.Event(), pending_save.Share.write

    def wait(share, folder):
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            event.wait(patience(30))
        return write(share, folder)

    monkeypatch.setattr(pending_save.Share, "write", wait)
    event.begun = begun
    yield event
    event.set()


def test_two_runs_of_one_process_with_one_id_leave_each_others_saves_alone(savers, held, tmp_path):
    generator, discriminator = savers
    generator.save(tmp_path / "generator", 1)
    generator.save(tmp_path / "generator", 2, wait=False)
    held.begun.wait(patience(30))
    discriminator.save(tmp_path / "discriminator", 3)
    held.set()
    generator.accelerator.wait_for_checkpoint()
    assert value_in(tmp_path / "generator") == 2
    assert value_in(tmp_path / "discriminator") == 3
    assert names(tmp_path) == ["discriminator", "generator"]


STOPS = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from accel_core.checkpoint import pending_save
from saver_job import Saver
write = pending_save.Share.write
def stop(share, folder):
    os.kill(os.getpid(), signal.SIGSTOP)
    return write(share, folder)
pending_save.Share.write = stop
Saver().save(Path({folder!r}), 1)
"""


def test_two_jobs_with_one_id_leave_each_others_saves_alone(savers, tmp_path, start_command):
    text = STOPS.format(tests=str(Path(__file__).parent), folder=str(tmp_path / "a"))
    with start_command([sys.executable, "-c", text]) as other:  # inherits the id
        assert os.WIFSTOPPED(os.waitpid(other.pid, os.WUNTRACED)[1])
        savers[0].save(tmp_path / "b", 2)
        other.send_signal(signal.SIGCONT)
        assert other.wait(patience(60)) == 0
    assert [value_in(tmp_path / name) for name in "ab"] == [1, 2]


def test_a_save_that_is_thought_dead_and_is_not_fails_and_the_old_one_stays(saver, held, tmp_path):
    saver.save(tmp_path / "here", 1)
    saver.save(tmp_path / "here", 2, wait=False)
    held.begun.wait(patience(30))
    (left,) = commit.leftover_ids(tmp_path)
    commit.remove_leftovers(tmp_path, {left}, keep_complete=False)
    held.set()
    with pytest.raises(CheckpointError, match="is not visible here"):
        saver.accelerator.wait_for_checkpoint()
    assert value_in(tmp_path / "here") == 1


def test_a_file_that_vanishes_before_the_commit_costs_that_save_only(saver, tmp_path, monkeypatch):
    saver.save(tmp_path / "here", 1)
    write = pending_save.write_manifest

    def remove(folder, content):
        write(folder, content)
        (folder / "state.json").unlink()

    monkeypatch.setattr(pending_save, "write_manifest", remove)
    with pytest.raises(CheckpointError, match=r"state.json was removed after it was written"):
        saver.save(tmp_path / "here", 2)
    assert value_in(tmp_path / "here") == 1
    assert names(tmp_path) == ["here"]


def test_what_another_run_has_saved_meanwhile_is_not_replaced(savers, held, tmp_path):
    first, second = savers
    first.save(tmp_path / "here", 1)
    first.save(tmp_path / "here", 2, wait=False)
    held.begun.wait(patience(30))
    second.save(tmp_path / "here", 3)
    held.set()
    with pytest.raises(CheckpointError, match="here has changed while this save was written: another run"):
        first.accelerator.wait_for_checkpoint()
    assert value_in(tmp_path / "here") == 3


def test_a_place_where_nothing_can_be_made_is_named_with_the_remedy(saver, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match=r"file/here cannot be saved: .*\nsave to a folder in"):
        saver.save(tmp_path / "file" / "here", 1)
    assert saver.save(tmp_path / "here", 2).exists()


# -- what else lies in the folder ------------------------------------------------------------------


def test_what_no_save_wrote_stays_when_a_checkpoint_is_replaced(saver, tmp_path):
    here = saver.save(tmp_path / "here", 1)
    (here / "tokenizer.json").write_text("words")
    saver.save(here / "best", 5)
    saver.save(here / "checkpoints" / "checkpoint_1", 6)
    with (here / "events.log").open("a") as log:
        saver.save(here, 2)
        log.write("written on")
    assert value_in(here) == 2
    assert value_in(here / "best") == 5
    assert value_in(here / "checkpoints" / "checkpoint_1") == 6
    assert (here / "tokenizer.json").read_text() == "words"
    assert (here / "events.log").read_text() == "written on"
    assert names(tmp_path) == ["here"]


def test_what_has_a_name_that_was_taken_meanwhile_is_kept_and_named(saver, tmp_path, monkeypatch, caplog):
    here = saver.save(tmp_path / "here", 1)
    (here / "notes").write_text("old")
    exchange = commit._exchange

    def taken(one, other):
        done = exchange(one, other)
        (here / "notes").write_text("new")
        return done

    monkeypatch.setattr(commit, "_exchange", taken)
    saver.save(here, 2)
    assert (here / "notes").read_text() == "new"
    (left,) = tmp_path.glob(".here.*/notes")
    assert left.read_text() == "old"
    assert f"notes should be in {here}, and could not be moved there: another file" in caplog.text

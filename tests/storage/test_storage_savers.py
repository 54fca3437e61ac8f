"""Several savers beside each other, whatever ids they have; and what else lies in a checkpoint's folder."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import pytest
from engine import load, save, save_beside_others
from saver_job import Saver

from accel_core import Checkpoint, Disk, open_checkpoint
from accel_core.errors import CheckpointError
from accel_core.storage import commit, opened, pending
from accel_testing.patience import patience


def value_in(folder):
    with open_checkpoint(Disk(folder)) as opened:
        (stored,) = Checkpoint.with_tensors(opened).tensors.values()
        return stored.number()


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
    event, begun, write = threading.Event(), threading.Event(), pending.Share.write

    def wait(share, folder):
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            event.wait(patience(30))
        return write(share, folder)

    monkeypatch.setattr(pending.Share, "write", wait)
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
from accel_core.storage import pending
from saver_job import Saver
write = pending.Share.write
def stop(share, folder):
    os.kill(os.getpid(), signal.SIGSTOP)
    return write(share, folder)
pending.Share.write = stop
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


def test_a_save_that_is_thought_dead_and_is_not_fails_and_the_old_one_stays(
    saver, held, tmp_path, monkeypatch
):
    saver.save(tmp_path / "here", 1)
    saver.save(tmp_path / "here", 2, wait=False)
    held.begun.wait(patience(30))
    with monkeypatch.context() as dead:
        dead.setattr(Disk, "is_claimed", lambda home: False)
        commit.prune(Disk(tmp_path / "here"), 1)
    assert len(names(tmp_path / "here")) == 2, "the manifest and its save"
    held.set()
    with pytest.raises(CheckpointError, match="is not visible here"):
        saver.accelerator.wait_for_checkpoint()
    assert value_in(tmp_path / "here") == 1


def test_a_file_that_vanishes_before_the_commit_costs_that_save_only(saver, tmp_path, monkeypatch):
    saver.save(tmp_path / "here", 1)
    create = pending.commit

    def remove(place, members, number, sizes):
        (place.path / members["save_id"] / "state.json").unlink()
        create(place, members, number, sizes)

    monkeypatch.setattr(pending, "commit", remove)
    with pytest.raises(CheckpointError, match=r"state.json was removed after it was written"):
        saver.save(tmp_path / "here", 2)
    assert value_in(tmp_path / "here") == 1
    assert len(names(tmp_path / "here")) == 2
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


def test_three_savers_and_a_reader_at_once_meet_nothing_but_whole_checkpoints(tmp_path, run_processes):
    here = tmp_path / "here"
    *savers, (reads, values) = run_processes(save_beside_others, str(here), 15, world=4)
    assert min(done for done, _ in savers) >= 15
    assert reads >= values > 3
    commit.prune(Disk(here), 0)
    assert len(names(here)) == 2, "a manifest and its save"


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


def test_a_reader_that_claims_after_its_checkpoint_was_replaced_reads_the_new_one(tmp_path, monkeypatch):
    """A saver removes manifests, looks for claims, then removes files that nobody claimed."""
    place, claimed, of = Disk(tmp_path / "here"), opened.reading, opened.Opened.of
    save(place, 1)

    def late(*arguments):
        monkeypatch.setattr(opened, "reading", claimed)
        monkeypatch.setattr(commit, "_remove_unnamed", lambda place: None)
        save(place, 2)
        return claimed(*arguments)

    def lost(place, manifest, home, *texts):
        found = of(place, manifest, home, *texts)
        if manifest.number == 1:
            home.remove([*home.list()])
        return found

    monkeypatch.setattr(opened, "reading", late)
    monkeypatch.setattr(opened.Opened, "of", lost)
    assert load(place)[1] == 2

"""The rules that hold for every library: late start, resume, failures that cost no training."""

from __future__ import annotations

import logging
import os
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from accel_core import AccelError, ConfigError
from accel_trackers.cards import WANDB, _missing


def started(tracker, config=None, options=None):
    tracker.tracking_started("project", config or {}, options or {})
    return tracker


def warnings(caplog):
    told = [record.message for record in caplog.records if record.name == "accel_trackers"]
    return [text.removeprefix("[RANK 0] ") for text in told]


def test_the_run_begins_with_the_first_log_and_has_the_settings(notes):
    tracker = started(notes(tags=("a",)), {"lr": 0.1, "path": Path("x"), "layers": (1, 2)})
    assert tracker.library.told == []

    tracker.log({"train": {"loss": 0.5}, "gone": None, "best": True}, 3, {})
    assert tracker.library.told == [
        ("open", "project", False),
        ("configure", {"lr": 0.1, "path": "x", "layers": [1, 2], "tags": ["a"]}),
        (3, {"train/loss": 0.5}),
        (3, {"best": True}),
        "end of log",
    ]


def test_two_values_of_one_name_are_refused(notes):
    with pytest.raises(
        AccelError, match="two values are called 'eval/loss', and one would be lost\ngive them"
    ):
        started(notes()).log({"eval/loss": 1, "eval": {"loss": 2}}, 0, {})


def test_a_run_in_which_nothing_is_logged_still_has_its_settings(notes):
    tracker = started(notes(), {"lr": 0.1})
    tracker.run_ended()

    assert tracker.library.told == [("open", "project", False), ("configure", {"lr": 0.1}), "close"]


def test_one_that_was_not_started_does_nothing(notes, tmp_path):
    tracker = notes()
    tracker.run_ended()

    assert (tracker.library.told, tracker.state_dict(), list(tmp_path.iterdir())) == ([], {}, [])


def test_the_option_wins_over_the_name_that_init_trackers_is_given(notes):
    tracker = started(notes(project="mine"))
    tracker.log({"x": 1}, 0, {})

    assert tracker.library.told[0] == ("open", "mine", False)


def test_a_resumed_run_has_the_id_of_the_first(notes):
    first = started(notes())
    state = first.state_dict()
    later = started(notes())
    later.load_state_dict(state)
    later.log({"x": 1}, 0, {})

    assert later.library.told[0] == ("open", "project", True)
    assert later.tracker.run_id == first.tracker.run_id == state["id"]
    assert later.state_dict() == state


def test_a_rank_that_does_not_log_keeps_the_id_for_nobody(notes):
    tracker = notes()
    tracker.load_state_dict({"id": "one"})

    assert tracker.library.told == []
    assert tracker.state_dict() == {"id": "one"}


def test_a_run_that_was_begun_before_the_load_is_left_with_a_word(notes, caplog):
    tracker = started(notes())
    tracker.log({"x": 1}, 0, {})
    tracker.load_state_dict({"id": "one"})
    tracker.log({"x": 2}, 1, {})

    assert tracker.library.told[-3:] == [("open", "project", True), (1, {"x": 2}), "end of log"]
    assert "was begun before load_state" in warnings(caplog)[0]


def test_a_load_of_its_own_checkpoint_changes_nothing(notes, caplog):
    tracker = started(notes())
    tracker.load_state_dict(tracker.state_dict())
    tracker.log({"x": 1}, 0, {})

    assert [told for told in tracker.library.told if told[0] == "open"] == [("open", "project", False)]
    assert warnings(caplog) == []


def test_two_runs_of_one_process_have_two_ids(notes):
    assert started(notes()).state_dict() != started(notes()).state_dict()


def test_a_run_that_cannot_be_opened_costs_its_data_and_one_warning(notes, caplog):
    tracker = started(notes())
    tracker.library.opens = False
    attempts = []
    tracker.library.arguments = lambda *given, resumed: attempts.append(1) or {}
    for step in range(3):
        tracker.log({"x": step}, step, {})
    tracker.log_images({"y": np.zeros((2, 2))})
    tracker.tracker.add_figure("anything").again()
    tracker.state_dict()
    tracker.run_ended()

    assert tracker.library.told == []
    assert attempts == [1]  # each may take a minute
    assert len(warnings(caplog)) == 1
    assert "nothing is logged: ConnectionError: the key is refused" in warnings(caplog)[0]


def test_an_id_is_kept_where_the_resumed_run_cannot_be_opened(notes):
    tracker = started(notes())
    tracker.library.opens = False
    tracker.load_state_dict({"id": "one"})

    assert tracker.state_dict() == {"id": "one"}


def test_a_value_that_fails_costs_no_other_and_is_said_once(notes, caplog):
    """Nor are those before it logged a second time."""
    tracker = started(notes())
    for step in range(3):
        tracker.log({"good": 1, "bad": 2, "word": "fine"}, step, {})

    logged = [((step, {"good": 1}), (step, {"word": "fine"}), "end of log") for step in range(3)]
    assert tracker.library.told[1:] == [each for one in logged for each in one]
    assert warnings(caplog) == ["notes: 'bad' could not be logged: OSError: no space for bad"]


def test_what_is_no_number_and_no_text_is_left_out_with_a_word(notes, caplog):
    tracker = started(notes())
    for step in range(2):
        tracker.log({"x": 1, "weights": torch.zeros(3)}, step, {})

    assert tracker.library.told[1::2] == [(0, {"x": 1}), (1, {"x": 1})]
    assert warnings(caplog) == ["notes: 'weights' is a Tensor, which is neither a number nor text: left out"]


def test_nothing_is_logged_to_a_run_that_has_ended(notes):
    """It would be begun again, and never closed."""
    tracker = started(notes())
    tracker.log({"x": 1}, 0, {})
    tracker.run_ended()

    with pytest.raises(AccelError, match=r"notes: its run has ended(.|\n)*\nlog before"):
        tracker.log_images({"y": np.zeros((2, 2))})
    assert tracker.library.told[-1] == "close"


def test_a_close_that_fails_is_no_error(notes, caplog, monkeypatch):
    tracker = started(notes())
    tracker.log({"x": 1}, 0, {})
    monkeypatch.setattr(tracker.library, "close", lambda: Path("/no/such/place").stat())
    tracker.run_ended()

    assert "what was logged last could not be logged: FileNotFoundError" in warnings(caplog)[0]


def test_ctrl_c_is_not_a_failure_of_the_library(notes, monkeypatch):
    def interrupted(values, step):
        raise KeyboardInterrupt

    tracker = started(notes())
    monkeypatch.setattr(tracker.library, "log", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tracker.log({"x": 1}, 0, {})


def test_folders_are_referenced_and_files_are_copied(notes, tmp_path):
    folder = tmp_path / "checkpoint"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "weights").write_bytes(b"12345")
    (tmp_path / "notes.txt").write_text("kept")
    tracker = started(notes())
    tracker.log_artifact(folder)
    tracker.log_artifact(tmp_path / "notes.txt", name="the notes")

    assert tracker.library.told[1:] == [
        ("reference", "checkpoint", {"uri": folder.as_uri(), "bytes": 5, "files": 1}),
        ("file", "the notes"),
    ]
    with pytest.raises(AccelError, match="there is nothing at"):
        tracker.log_artifact(tmp_path / "gone")


@pytest.mark.parametrize("name", ["../notes", "/notes", "a/../../b"])
def test_the_name_of_an_artifact_may_not_lead_out_of_the_run(notes, tmp_path, name):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(AccelError, match=r"leads out of the run's files\ngive it another"):
        started(notes()).log_artifact(tmp_path / "notes.txt", name=name)


def test_a_folder_that_vanishes_while_it_is_described_costs_no_training(notes, tmp_path, monkeypatch, caplog):
    def rglob(folder, pattern):
        raise FileNotFoundError("weights.bin")

    monkeypatch.setattr(Path, "rglob", rglob)
    started(notes()).log_artifact(tmp_path)
    assert "an artifact could not be logged: FileNotFoundError: weights.bin" in warnings(caplog)[0]


@pytest.mark.parametrize("project", ["", "  ", None])
def test_a_project_without_a_name_is_refused(notes, project):
    with pytest.raises(ConfigError, match=r"the project is .*\ngive init_trackers a name"):
        notes().tracking_started(project, {}, {})


def test_a_folder_that_cannot_be_made_is_refused(notes, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"cannot be made: .*\ngive another directory"):
        started(notes(directory=str(tmp_path / "file" / "logs")))


def test_an_address_is_no_folder(notes):
    """The working folder was taken for it."""
    with pytest.raises(ConfigError, match=r"asked for at s3://bucket/logs(.|\n)*\nset notes.directory"):
        started(notes(directory="s3://bucket/logs"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_refused(notes, tmp_path):
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(ConfigError, match="cannot be written\ngive another directory"):
        started(notes(directory=str(tmp_path / "closed")))


def test_a_misspelt_argument_of_the_library_is_refused(notes):
    with pytest.raises(ConfigError, match=r"takes no 'entitty'; did you mean 'entity'\?"):
        started(notes(), options={"entitty": "team"})


def test_a_misspelt_argument_of_a_log_is_refused(notes):
    with pytest.raises(ConfigError, match=r"unexpected keyword argument 'color'.*\nleave it out"):
        started(notes()).log({"x": 1, "y": 2}, 0, {"color": "red"})


def test_a_library_that_is_not_installed_is_a_line_with_its_extra():
    reason = _missing("no_such_library", "wandb")

    assert reason == "no_such_library is not installed; it comes with the extra accel-trackers[wandb]"
    assert WANDB.probe is not None


def test_warnings_go_to_a_logger_of_the_package(notes, caplog):
    with caplog.at_level(logging.ERROR, logger="accel_trackers"):
        started(notes()).log({"weights": torch.zeros(3)}, 0, {})

    assert warnings(caplog) == []


def test_numbers_of_other_kinds_are_floats_and_complex_ones_are_left_out(notes, caplog):
    """Comet left a Decimal out without a word."""
    tracker = started(notes())
    tracker.log({"price": Decimal("1.5"), "part": Fraction(1, 4), "phase": 1 + 2j, "most": 10**400}, 0, {})

    logged = [told[1] for told in tracker.library.told[1:-1]]
    assert logged == [{"price": 1.5}, {"part": 0.25}, {"most": 10**400}]
    assert type(logged[0]["price"]) is type(logged[1]["part"]) is float
    assert warnings(caplog) == ["notes: 'phase' is a complex, which is neither a number nor text: left out"]


def test_whole_numbers_of_numpy_stay_whole(notes):
    """As a float, a count of more than 2**53 tokens is another."""
    tracker = started(notes())
    tracker.log({"tokens": np.int64(2**53 + 1), "loss": np.float32(0.5)}, 0, {})

    logged = [value for told in tracker.library.told[1:-1] for value in told[1].values()]
    assert logged == [2**53 + 1, 0.5]
    assert list(map(type, logged)) == [int, float]

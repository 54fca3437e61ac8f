"""Of several ranks that failed, which one is the cause."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from accel_core.launch import worker
from accel_core.launch.failure import first_failure, noted_failures

NOW = 1_000_000


def noted(at: float, of: int | None = None):
    note = {
        "message": "ValueError: x",
        "extraInfo": {"py_callstack": "Traceback\n", "timestamp": str(NOW), "time": NOW + at, "of": of},
    }
    return SimpleNamespace(exitcode=1, timestamp=NOW, local_rank=0, error_file_data={"message": note})


def silent(exitcode: int, at: float = 1):
    name = signal.Signals(-exitcode).name if exitcode < 0 else ""
    return SimpleNamespace(
        exitcode=exitcode,
        timestamp=NOW + at,
        local_rank=0,
        error_file_data={"message": "<NONE>"},
        signal_name=lambda: name,
    )


def test_the_earliest_note_wins_within_the_same_second():
    assert first_failure({0: noted(0.2), 1: noted(0.1), 2: noted(0.3)}).rank == 1


def test_a_rank_that_reports_the_error_of_another_is_not_the_cause():
    assert first_failure({0: noted(0.3), 1: noted(0.1, of=0), 2: noted(0.2, of=0)}).rank == 0


@pytest.mark.parametrize("exitcode", [-signal.SIGKILL, -signal.SIGSEGV, 7])
def test_who_is_gone_without_a_word_was_first_since_the_others_noticed_before_the_agent(exitcode):
    assert first_failure({0: noted(0.1), 1: silent(exitcode)}).rank == 1


@pytest.mark.parametrize("exitcode", [-signal.SIGTERM, -signal.SIGABRT])
def test_who_was_ended_by_the_agent_or_aborted_for_want_of_a_peer_is_not_the_cause(exitcode):
    assert first_failure({0: silent(exitcode), 1: noted(0.1)}).rank == 1


def test_who_had_to_be_killed_by_the_agent_is_not_the_cause():
    assert first_failure({0: silent(-signal.SIGKILL, at=30), 1: noted(0.1)}).rank == 1


def test_an_abort_is_the_cause_where_nothing_else_is():
    failure = first_failure({0: silent(-signal.SIGTERM), 1: silent(-signal.SIGABRT)})

    assert (failure.rank, failure.exit_code) == (1, 128 + signal.SIGABRT)


def test_an_abort_on_the_way_out_does_not_hide_how_the_script_ended():
    failed = noted(0.1)
    failed.exitcode = -signal.SIGABRT
    failed.error_file_data["message"]["extraInfo"]["code"] = 1

    assert first_failure({0: failed}).exit_code == 1


def test_an_exit_code_without_a_traceback_is_stated():
    note = {"message": "exit code 3", "extraInfo": {"py_callstack": "", "timestamp": "1", "time": NOW}}
    failed = SimpleNamespace(exitcode=3, timestamp=NOW, local_rank=1, error_file_data={"message": note})

    assert str(first_failure({5: failed})) == "rank 5 (local 1) exited with code 3"


def test_a_note_is_there_whole_or_not_at_all(tmp_path, monkeypatch):
    def full(file, text, **_):
        file.write_bytes(text[:10].encode())
        raise OSError("No space left on device")

    note = tmp_path / "error.json"
    monkeypatch.setenv(worker.NOTE, str(note))
    with monkeypatch.context() as disk:
        disk.setattr(Path, "write_text", full)
        with pytest.raises(SystemExit):
            worker.guard(lambda: sys.exit(3))
    assert not note.exists()

    with pytest.raises(SystemExit):
        worker.guard(lambda: sys.exit(3))
    failures = noted_failures({(5, 1): note, (6, 2): tmp_path / "none.json"})
    assert str(first_failure(failures)) == "rank 5 (local 1) exited with code 3"

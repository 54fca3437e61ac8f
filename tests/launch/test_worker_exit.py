"""What runs at exit can tell that a script failed, under the launcher's worker as under plain python."""

from __future__ import annotations

import json
import os

import pytest

from accel_core.launch.worker import command

SCRIPT = """
import atexit, sys
atexit.register(lambda: print("at exit:", type(getattr(sys, "last_value", None)).__name__))
{last}
"""


def at_exit(run_command, tmp_path, last):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(last=last))
    ended = run_command(command([str(script)]), capture_output=True, text=True, timeout=60, check=False)
    return ended.returncode, ended.stdout.strip()


def test_a_failed_script_leaves_its_exception_for_what_runs_at_exit(tmp_path, run_command):
    assert at_exit(run_command, tmp_path, "raise KeyError('x')") == (1, "at exit: KeyError")


def test_a_script_that_ends_leaves_none(tmp_path, run_command):
    assert at_exit(run_command, tmp_path, "") == (0, "at exit: NoneType")


NOTES = {
    "sys.exit(2**70)": (255, None),  # python's own code for a number that no byte holds
    "raise KeyboardInterrupt": (130, "KeyboardInterrupt"),
}


@pytest.mark.parametrize("last", NOTES)
def test_whatever_a_script_ends_by_is_noted(tmp_path, last, run_command):
    note, script = tmp_path / "note.json", tmp_path / "script.py"
    script.write_text(f"import sys\n{last}\n")
    told = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(note)}
    ended = run_command(command([str(script)]), env=told, capture_output=True, timeout=60, check=False)

    message = json.loads(note.read_text())["message"]["message"] if note.exists() else None
    assert (ended.returncode, message) == NOTES[last]


def test_a_note_that_cannot_be_written_is_told_on_the_terminal(tmp_path, run_command):
    script = tmp_path / "script.py"
    script.write_text("raise ValueError('x')")
    told = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(tmp_path / "gone" / "note.json")}
    ended = run_command(command([str(script)]), env=told, capture_output=True, timeout=60, check=False)

    assert ended.stderr.splitlines()[-1] == b"ValueError: x"
    assert b"FileNotFoundError" not in ended.stderr


def test_a_module_stays_main_for_what_runs_after_it(tmp_path, run_command):
    last = "atexit.register(lambda: print(len(pickle.dumps(Late())) > 0))"
    (tmp_path / "late.py").write_text(f"import atexit, pickle\nclass Late: pass\n{last}\n")
    words = command(["-m", "late"])
    ended = run_command(words, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)

    assert (ended.returncode, ended.stdout) == (0, "True\n"), ended.stderr

"""What runs at exit can tell that a script failed, under the launcher's worker as under plain python."""

from __future__ import annotations

import subprocess

from accel_core.worker import command

SCRIPT = """
import atexit, sys
atexit.register(lambda: print("at exit:", type(getattr(sys, "last_value", None)).__name__))
{last}
"""


def at_exit(tmp_path, last):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(last=last))
    ended = subprocess.run(command([str(script)]), capture_output=True, text=True, timeout=60, check=False)
    return ended.returncode, ended.stdout.strip()


def test_a_failed_script_leaves_its_exception_for_what_runs_at_exit(tmp_path):
    assert at_exit(tmp_path, "raise KeyError('x')") == (1, "at exit: KeyError")


def test_a_script_that_ends_leaves_none(tmp_path):
    assert at_exit(tmp_path, "") == (0, "at exit: NoneType")

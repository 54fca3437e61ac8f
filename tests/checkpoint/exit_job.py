"""A script that saves in the background and ends at once."""

from __future__ import annotations

import sys
import textwrap

import async_job

SCRIPT = """
    import sys
    from pathlib import Path
    sys.path.insert(0, {tests!r})
    import async_job
    job, folder = async_job.Job(), Path({folder!r})
    job.accelerator.save_state(folder / "first")
    {trouble}
    job.accelerator.save_state(folder / "here", wait=False)
    {last}
"""


def at_exit(run_command, tmp_path, trouble="pass", last="pass"):
    tests = async_job.__file__.rpartition("/")[0]
    script = textwrap.dedent(SCRIPT).format(tests=tests, folder=str(tmp_path), trouble=trouble, last=last)
    command = [sys.executable, "-c", script]
    return run_command(command, check=False, capture_output=True, text=True, timeout=60)

"""Checkpoints for tests, read into memory, and changed."""

from __future__ import annotations

import re
import sys

from accel_checkpoint_tools.contents import Contents

WATCHED = """
import re, sys, threading, time
def sample():
    while True:
        now = int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) // 1024
        peak[0] = max(peak[0], now)
        time.sleep(0.002)
peak = [0]
threading.Thread(target=sample, daemon=True).start()
from accel_core.cli import main
sys.argv = ["accel", *sys.argv[1:]]
try:
    main()
finally:
    print("peak", peak[0], file=sys.stderr)
"""


def tensors_of(folder):
    """Return the tensors of a checkpoint by (unit, key)."""
    with Contents.open(folder) as contents:
        return read(contents)


def read(contents):
    return {key: source.read() for key, source in contents.tensors.items()}


def tensor(contents, unit, key):
    return contents.tensors[unit, key].read()


def rewrite(source, target, change):
    """Write a checkpoint again, changed by a function."""
    with Contents.open(source) as contents:
        change(contents)
        return contents.write(target).path


def watched(run_command, *words, status=0):
    """Run `accel checkpoint`; return what it prints, and the most memory in MiB that is not a file's."""
    command = [sys.executable, "-c", WATCHED, "checkpoint", *map(str, words)]
    ended = run_command(command, capture_output=True, text=True, check=False)
    assert ended.returncode == status, ended.stderr
    return ended.stdout, int(re.search(r"peak (\d+)", ended.stderr)[1])

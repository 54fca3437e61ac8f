"""Wait for torch's threads, which cannot be joined."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Final

FINISH_SECONDS: Final = 0.1


def let_threads_finish() -> None:
    """Let this process's other threads run until none of them is runnable.

    Returns after `FINISH_SECONDS` in any case.

    A thread of a process group drops the tensors of a collective after it has told those that wait for it,
    and needs the interpreter's lock for that. A thread that takes the lock while the interpreter ends
    aborts the process.
    """
    until = time.monotonic() + FINISH_SECONDS
    while time.monotonic() < until:
        time.sleep(0.002)  # without the lock
        if sys.platform == "linux" and not any(map(_wants_to_run, _others())):
            return


def _others() -> list[Path]:
    own = str(threading.get_native_id())
    return [task for task in Path("/proc/self/task").iterdir() if task.name != own]


def _wants_to_run(task: Path) -> bool:
    try:
        state = task.joinpath("stat").read_text(encoding="utf-8").rpartition(") ")[2][:1]
    except OSError:  # it has ended
        return False
    return state == "R"

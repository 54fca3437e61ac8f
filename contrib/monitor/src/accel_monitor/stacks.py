"""Python stacks of this process, for a rank that makes no progress."""

from __future__ import annotations

import platform
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from accel_core import tell

__all__ = ["remove_stacks", "write_stacks"]


def write_stacks(folder: Path | None, rank: int, where: str) -> bool:
    """Write all threads' stacks to `rank-RANK.txt`; to stderr if that cannot be.

    where: the place of the main thread in words. Returns whether the file is written.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [f"rank {rank} on {platform.node()}, {time.strftime('%Y-%m-%d %H:%M:%S')}: {where}\n"]
    for thread, frame in sys._current_frames().items():
        parts += [f"\nthread {names.get(thread, thread)}\n", *traceback.format_stack(frame)]
    text = "".join(parts)
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            folder.joinpath(_file(rank)).write_text(text, encoding="utf-8")
            return True
    except OSError as error:  # a full disk: stderr is left
        text = f"{error}\n{text}"
    tell(text)
    return False


def remove_stacks(folder: Path, silent: Iterable[int]) -> None:
    """Remove the files of an earlier hang, of ranks that write none in this one."""
    for rank in silent:
        with suppress(OSError):
            folder.joinpath(_file(rank)).unlink(missing_ok=True)


def _file(rank: int) -> str:
    return f"rank-{rank}.txt"

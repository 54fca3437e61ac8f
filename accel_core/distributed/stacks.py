"""Python stacks of this process, for a rank that makes no progress."""

from __future__ import annotations

import platform
import sys
import threading
import time
import traceback
from pathlib import Path

from accel_core.distributed.stderr import tell

__all__ = ["write_stacks"]


def write_stacks(folder: Path | None, rank: int, where: str) -> None:
    """Write the stacks of all threads to `rank-RANK.txt`; to stderr without a folder.

    where: the place of the main thread in words.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [f"rank {rank} on {platform.node()}, {time.strftime('%Y-%m-%d %H:%M:%S')}: {where}\n"]
    for thread, frame in sys._current_frames().items():
        parts += [f"\nthread {names.get(thread, thread)}\n", *traceback.format_stack(frame)]
    text = "".join(parts)
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            folder.joinpath(f"rank-{rank}.txt").write_text(text, encoding="utf-8")
            return
    except OSError as error:  # a full disk: stderr is left
        text = f"{error}\n{text}"
    tell(text)

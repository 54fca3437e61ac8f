"""Files that a worker has mapped, for the report of its end.

Reading a mapped page of a file that was cut ends the process by SIGBUS, with no exception and no note.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from accel_core.launch.worker import NOTE


def note_mapped_file(path: str | os.PathLike[str]) -> None:
    """Have the launcher name this file if the process ends because the file was cut.

    Call it when the file has been mapped. Without a launcher of accel-core it does nothing.
    """
    note = os.environ.get(NOTE)
    if not note:
        return
    with suppress(OSError):  # the disk is full: the report lacks the file's name
        file = Path(path).resolve()
        line = json.dumps([str(file), file.stat().st_ino, file.stat().st_size])
        with _list_beside(note).open("a", encoding="utf-8") as noted:
            noted.write(f"{line}\n")


def cut_files(note: str) -> list[str]:
    """Return the noted files of the worker with this error file that are shorter now."""
    found = []
    with suppress(OSError, ValueError):  # none was noted, or the process ended while it noted one
        for line in _list_beside(note).read_text(encoding="utf-8").splitlines():
            path, number, size = json.loads(line)
            with suppress(OSError):  # a file that is gone under its name stays whole under its mapping
                status = Path(path).stat()
                if status.st_ino == number and status.st_size < size:
                    found.append(f"{path} had {size} bytes, and now has {status.st_size}")
    return list(dict.fromkeys(found))


def _list_beside(note: str) -> Path:
    return Path(note).with_name("mapped")

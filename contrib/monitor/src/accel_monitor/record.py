"""The file of a run's record."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from accel_core import LineFile, explain, masked

if TYPE_CHECKING:
    from accel_core import Run

__all__ = ["FOLDER", "RecordFile"]

FOLDER: Final = "records"
"""In the project's folder."""
GIT: Final = ("git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
GIT_SECONDS: Final = 2.0


class RecordFile:
    """`project_dir/records/START-RUN.jsonl`.

    The file is made for the first event. A run that loads a checkpoint goes on in the file that the
    checkpoint names.
    """

    def __init__(self, run: Run, project: str) -> None:
        self._run, self._folder = run, Path(project, FOLDER)
        started = time.strftime("%Y%m%d-%H%M%S")
        self.name = f"{started}-{re.sub('[^0-9A-Za-z]+', '', run.run_id)[:8]}"
        self._first_step = 0
        self._file: LineFile | None = None
        self._early: list[dict[str, Any]] = []
        """Lines that wait for the first event: a checkpoint may still name the file."""

    @property
    def is_open(self) -> bool:
        """True once a line was written."""
        return self._file is not None

    @property
    def is_closed(self) -> bool:
        """True once the file can no longer be written."""
        return self._file is not None and not self._file.close.alive

    def go_on(self, name: str, step: int) -> None:
        """Write to the file of this name, which a checkpoint has; steps before are done."""
        self._first_step = step
        if re.fullmatch(r"[\w-]+", name):  # it becomes a path
            self.name = name

    def write(self, kind: str, *, early: bool = False, **fields: Any) -> None:
        """Write a line. early: it may wait until the first line that may not."""
        line = {"kind": kind, **fields}
        if kind == "warning":
            line["text"] = masked(fields["text"])
        if self._file is None and early:
            self._early.append(line)
            return
        if self._file is None:
            self._open()
        assert self._file is not None
        self._file.write(**line)

    def end(self) -> None:
        """Write the lines that wait, and close the file."""
        if any(line["kind"] != "end" for line in self._early):
            self._open()
        self.close()

    def close(self) -> None:
        """Close the file, if it is open."""
        if self._file is not None:
            self._file.close()

    def _open(self) -> None:
        self._file = self._locked()
        for line in ({"kind": "run", **self._heading()}, *self._early):
            self._file.write(**line)
        self._early.clear()

    def _locked(self) -> LineFile:
        """Open the file; another one beside it, if a process that lives writes to it."""
        number = 1
        while True:
            file = LineFile(self._folder / f"{self.name}{f'-{number}' if number > 1 else ''}.jsonl")
            try:
                import fcntl

                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                number += 1
                continue
            except (ImportError, OSError):  # Windows, or a file system without locks
                pass
            return file

    def _heading(self) -> dict[str, Any]:
        run = self._run
        stack = {chosen.name: chosen.record.origin for chosen in run.stack.members()}
        module = sys.modules.get(f"torch.{run.device.type}")
        name = getattr(module, "get_device_name", str)(run.device)
        return {
            "run": run.run_id,
            "step": self._first_step,
            "script": sys.argv[0],
            "explain": explain(run).splitlines(),
            "config": [*run.resolved.rows()],
            "notes": [*run.resolved.notes, *run.stack.notes],
            "versions": {"python": platform.python_version(), "torch": str(torch.__version__), **stack},
            "git": _git_state(),
            "processes": run.world.size,
            "restarts": run.world.restart_count,
            "host": platform.node(),
            "device": {"type": run.device.type, "name": name},
            "device_specs": dict(run.hooks["monitor.device_specs"](run.device)),
            "mesh": None if run.mesh is None else {dim.name: dim.size for dim in run.mesh.dims},
        }


def _git_state() -> str | None:
    """Return the commit of the working folder, or None.

    It ends in "-dirty" where files differ.
    """
    try:
        found = subprocess.run(  # noqa: S603  the command is ours
            GIT, capture_output=True, text=True, timeout=GIT_SECONDS, check=False
        )
    except (OSError, subprocess.SubprocessError):  # no git, or a repository too large to ask
        return None
    return found.stdout.strip() or None

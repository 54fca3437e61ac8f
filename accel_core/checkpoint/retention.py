"""The checkpoints that were named for the user: which number is next, which is newest, which may go.

They are `PROJECT/checkpoints/checkpoint_N`. Numbers rise with every save, whatever the clock says. A
folder is one of them if its own manifest says that it was saved under this name; any other is foreign:
it is never picked and never removed. One rank calls these.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from accel_core.checkpoint.commit import discard
from accel_core.checkpoint.files import Manifest, manifest_if_any
from accel_core.checkpoint.paths import local_path

if TYPE_CHECKING:
    from accel_core.contract.run import Run

__all__ = ["candidates", "folder_of", "history", "next_number", "number_in", "retain"]

logger = logging.getLogger(__name__)

_NAME: Final = re.compile(r"checkpoint_(0|[1-9]\d*)")
_WRITING: Final = re.compile(r"\.checkpoint_(0|[1-9]\d*)\..*\.partial")


def folder_of(run: Run) -> Path:
    """Where this run's numbered checkpoints are."""
    return Path(os.path.realpath(local_path(run.config.project.project_dir or "."))) / "checkpoints"


def next_number(run: Run) -> int:
    """A number above that of everything in the folder, also what others are saving there now."""
    folder = folder_of(run)
    taken = [number for pattern in (_NAME, _WRITING) for number, _ in _numbered(folder, pattern)]
    number = max([run.iteration, *(each + 1 for each in taken)])
    if number > run.iteration:
        logger.warning(
            "%s: up to number %d there are checkpoints that this run neither wrote nor resumed from;"
            " they stay, and it goes on with number %d",
            *(folder, number - 1, number),
        )
    return number


def number_in(name: str) -> int:
    """N of `checkpoint_N`."""
    return int(name.rpartition("_")[2])


def candidates(run: Run) -> list[str]:
    """What may be loaded, by name, newest first: what this run and those that resumed it saved, else all."""
    found: list[tuple[Path, Manifest | None]] = []
    for _, path in _numbered(folder_of(run)):
        manifest = manifest_if_any(path)  # None: whoever loads it finds out why, and says so
        if manifest is None or manifest.name == path.name:
            found.append((path, manifest))
        else:
            logger.warning("passed over: %s was not saved under this name, but as %s", path, manifest.name)
    intact = [manifest for _, manifest in found if manifest is not None]
    newest = next((each for each in intact if run.run_id in each.lineage), None)
    if newest is not None:
        found = [each for each in found if each[1] is None or run.run_id in each[1].lineage]
    elif intact:
        strangers = [
            e for e in intact if e.run_id not in intact[0].lineage and intact[0].run_id not in e.lineage
        ]
        if strangers:
            logger.warning(
                "%s has checkpoints of several runs; the newest, %s, is taken, and %s is of another run",
                *(folder_of(run), intact[0].name, strangers[0].name),
            )
    return [path.name for path, _ in found]


def history(run: Run, loaded: Manifest) -> dict[int, str]:
    """The numbered checkpoints that led to the loaded one, itself included: number -> save id."""
    return {
        number: manifest.save_id
        for number, path in _numbered(folder_of(run))
        if number <= loaded.iteration
        and (manifest := manifest_if_any(path))
        and manifest.run_id in loaded.lineage
    }


def retain(run: Run, save_id: str) -> None:
    """Remove the oldest of what this run wrote or resumed from, down to `total_limit`.

    Renamed aside first: nothing half removed ever bears the name of a checkpoint. What no save wrote stays
    in a folder of that name. What fails is logged: the save itself is complete.
    """
    folder, limit = folder_of(run), run.config.project.total_limit
    for number in sorted(run.kept)[: -limit if limit else 0]:
        path, expected = folder / f"checkpoint_{number}", run.kept.pop(number)
        manifest = manifest_if_any(path)
        if (
            manifest is None
            or (manifest.name, manifest.save_id) != (path.name, expected)
            or path.is_symlink()
        ):
            logger.warning("%s is not what this run saved; it stays", path)
            continue
        aside = folder / f".{path.name}.{save_id}.removed"
        try:
            path.rename(aside)
        except OSError as error:
            logger.warning("%s could not be removed: %s", path, error)
            continue
        discard(aside, path)
        if path.exists():
            kept = ", ".join(sorted(each.name for each in path.iterdir()))
            logger.warning(
                "%s: the checkpoint is removed by total_limit; %s, not part of it, stays", path, kept
            )


def _numbered(folder: Path, pattern: re.Pattern[str] = _NAME) -> list[tuple[int, Path]]:
    """(number, path) of all entries with such a name, newest first."""
    entries = folder.iterdir() if folder.is_dir() else ()
    named = [(int(name[1]), path) for path in entries if (name := pattern.fullmatch(path.name))]
    return sorted(named, reverse=True)

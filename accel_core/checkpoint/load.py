"""Loading: everything is verified and compared first; only then is any state touched, in place."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from accel_core.checkpoint.agree import agree
from accel_core.checkpoint.commit import locate
from accel_core.checkpoint.read import Checkpoint
from accel_core.checkpoint.restore import Restoration
from accel_core.errors import CheckpointError

if TYPE_CHECKING:
    from accel_core.run import Run

__all__ = ["load"]


def load(run: Run, directory: str | os.PathLike[str], *, strict: bool = True) -> None:
    """Bring the run into the state that the checkpoint `directory` holds. Collective: all ranks.

    The checkpoint may have been saved by another stack, or at another world size; what that means for
    random numbers is said in docs/checkpoint-format.md. Runs no code of the checkpoint's.
    `strict=False` loads what fits and logs the rest.

    Raises:
        CheckpointError: it is no checkpoint, a file is damaged, or (strict) the run has other state
            than it has: missing, unexpected and mismatched states are named. Raised on all ranks,
            before any state is touched.
    """
    run.require_alive()
    control = run.collectives("control")
    folder = locate(Path(os.path.realpath(directory)))
    checkpoint = agree(control, lambda: Checkpoint.open(folder))
    ids = control.all_gather_object(checkpoint.manifest.save_id)
    if len(set(ids)) > 1:
        raise CheckpointError(
            f"ranks see different checkpoints in {folder}: saves {', '.join(sorted(set(ids)))}\n"
            "give all ranks the same directory, on a disk that all nodes share",
            path=str(folder),
        )
    agree(control, lambda: checkpoint.verify(control.rank, control.size))
    restoration = agree(control, lambda: Restoration(run, checkpoint, strict=strict))
    agree(control, restoration.apply)

"""Options of `accel submit --launcher slurm`."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Final

from attrs import frozen

from accel_core import option

__all__ = ["SlurmConfig"]

OURS: Final = {
    "--nodes": "launch.nodes",
    "-N": "launch.nodes",
    "--ntasks": "launch.processes_per_node",
    "-n": "launch.processes_per_node",
    "--ntasks-per-node": "launch.processes_per_node",
    "--tasks-per-node": "launch.processes_per_node",
    "--signal": "slurm.warning_seconds",
    "--requeue": "slurm.requeue",
    "--no-requeue": "slurm.requeue",
    "--parsable": "accel submit",
    "--wrap": "accel submit",
    "--export": "variables of the shell",
    "--test-only": "accel submit --dry-run",
    "--wait": "the command that accel submit prints",
    "-W": "the command that accel submit prints",
}
"""Options of sbatch that are not the user's: what does the same here."""


@frozen(kw_only=True)
class SlurmConfig:
    """Jobs that are handed to sbatch. Section `slurm`."""

    options: str = option(
        "",
        help="More options of sbatch, as on its command line: --partition=gpu --gres=gpu:8 --time=4:00:00.",
    )
    warning_seconds: int = option(
        120, minimum=0, unit="s", help="Time before the limit at which the ranks are told to save; 0: never."
    )
    requeue: bool = option(
        True, help="Put a job that was told to save, and ended well, into the queue again."
    )

    def __attrs_post_init__(self) -> None:
        words = [word.partition("=")[0] for word in shlex.split(self.options)]
        if "\n" in self.options or (words and not words[0].startswith("-")):
            raise ValueError(f"options {self.options!r} are not one line of options; write --partition=gpu")
        for word in words:
            found = word[:2] if word[:2] in OURS else next(filter(_names(word), OURS), None)
            if found is not None:
                raise ValueError(
                    f"options have {word}, which accel submit decides; use {OURS[found]} instead"
                )


def _names(word: str) -> Callable[[str], bool]:
    """Return a test of options: sbatch takes a long one by its first letters too."""
    return lambda option: len(word) > 2 and option.startswith(word)

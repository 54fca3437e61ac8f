"""Compare a checkpoint with a run, section by section; then change the run's state in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from accel_core.checkpoint.problems import Action, Problems
from accel_core.checkpoint.sections import SECTIONS
from accel_core.errors import CheckpointError
from accel_core.storage.tensors import Checkpoint, fill

if TYPE_CHECKING:
    from accel_core.checkpoint.sections.models import UnitPlan
    from accel_core.contract.run import Run
    from accel_core.contract.state import Leaf
    from accel_core.storage.opened import Block
    from accel_core.storage.tensors import Stored

Read = tuple["Stored", "Leaf | None"]
"""A stored tensor and the leaf that it fills; None if all of it may be read."""


class Restoration:
    """The actions that bring a run into a checkpoint's state, as the sections plan them."""

    def __init__(self, run: Run, checkpoint: Checkpoint, *, strict: bool) -> None:
        world, topology = checkpoint.manifest.world, run.topology
        self.run, self.checkpoint = run, checkpoint
        self.problems = Problems(checkpoint.place, strict)
        self.is_same_world = (world["readers"], world["size"]) == (topology.readers, run.world.size)
        self.own = checkpoint.rank_state(run.world.rank if self.is_same_world else 0)
        """What this rank takes from a rank's own file, still encoded."""
        self.units: list[UnitPlan] = []
        """The units that both sides have. The section `models` adds them."""
        self.calls: list[Action] = []
        """Code of other people, which may fail: it runs first."""
        self.copies: list[Action] = []
        """What core copies or sets, and what must come after it."""
        self.reads: list[Callable[[], Iterable[Read]]] = []
        """What `copies` read from data files."""
        self.extra: dict[str, Any] = {}
        """Values of the caller's own; `apply` fills them in."""

    @classmethod
    def planned(cls, run: Run, checkpoint: Checkpoint, *, strict: bool) -> Restoration:
        """Compare the checkpoint with the run, which is not changed.

        Raises:
            MisfitError: the checkpoint does not fit the run.
        """
        restoration = cls(run, checkpoint, strict=strict)
        for section in SECTIONS:
            section.plan(restoration)
        restoration.problems.raise_if_any()
        return restoration

    def give(self, what: str, encoded: Any, take: Callable[[Any], object]) -> None:
        """Plan to give the decoded value to `take`. A value that cannot be decoded raises now."""
        self.calls.append((what, partial(take, self.checkpoint.decode(encoded, what))))

    def fill(self, what: str, leaves: Mapping[str, Leaf], saved: Mapping[str, Stored]) -> set[str]:
        """Plan to copy stored tensors into leaves; return the names of tensors that do not fit."""
        misfits, places = set(), []
        self.problems.compare(what, saved, leaves)
        for name, stored in saved.items():
            if name in leaves and self.problems.tensor_fits(f"{what}{name}", leaves[name], stored):
                stored.require(leaves[name])
                places.append((stored, leaves[name]))
            elif name in leaves:
                misfits.add(name)
        if places:
            self.reads.append(lambda: places)
            self.copies.append((what.removesuffix("/"), partial(fill, places)))
        return misfits

    def blocks(self) -> set[Block]:
        """Return the blocks that `apply` reads: values of objects are read already."""
        return self.checkpoint.blocks_of(read for reads in self.reads for read in reads())

    def apply(self) -> None:
        """Make all changes.

        Raises:
            CheckpointError: an action failed; it says which, and what it leaves behind.
        """
        actions = [*self.calls, *self.copies]
        with torch.inference_mode(False), torch.no_grad():  # what is made here is trained on
            for done, (what, action) in enumerate(actions):
                try:
                    action()
                except Exception as error:  # other people's code, of any kind: the message says where
                    before = list(dict.fromkeys(name for name, _ in actions[:done]))
                    raise _mixed(self.checkpoint.place, what, before, error) from error


def _mixed(folder: object, what: str, done: Sequence[str], error: Exception) -> CheckpointError:
    """Return the error for an action that failed after others were done."""
    state = "nothing else was changed"
    if done:
        more = f" and {len(done) - 5} more" if len(done) > 5 else ""
        state = f"the run is in a mixed state: of {folder} it has {', '.join(done[:5])}{more}"
    return CheckpointError(
        f"load_state: {what} could not be restored, and may be half loaded: {type(error).__name__}: {error}\n"
        f"{state}\nload it into a new run, once that object takes back what it gave",
        path=str(folder),
    )

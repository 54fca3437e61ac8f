"""A save and a load under way, as the sections are given them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field, frozen

from accel_core.checkpoint.problems import Action, Problems
from accel_core.errors import CheckpointError
from accel_core.storage.state import State
from accel_core.storage.tensors import Checkpoint, fill

if TYPE_CHECKING:
    from accel_core.contract.run import Run
    from accel_core.contract.state import Leaf
    from accel_core.contract.unit import Unit
    from accel_core.storage.opened import Block
    from accel_core.storage.tensors import Stored

Read = tuple["Stored", "Leaf | None"]
"""A stored tensor and the leaf that it fills; None if all of it may be read."""


@frozen
class Save:
    """A save that is being collected on this rank."""

    run: Run
    extra: Mapping[str, Any] | None
    """Values of the caller's own."""
    alone: bool
    """True if this rank saves as rank 0 and reader 0 of a world of one, whatever rank it is."""
    state: State = field(factory=State)


@define(eq=False)
class UnitPlan:
    """A unit of this run and what the checkpoint has of it."""

    unit: Unit
    saved: Mapping[str, Any]
    """The unit as it was described in JSON."""
    leaves: Mapping[str, Leaf]
    """The weights and buffers of this run, by name."""
    model: dict[str, Stored]
    """Stored weights by name; tied weights are named as in this run, here and in the other two."""
    optimizer: dict[str, Stored]
    plugins: dict[str, Stored]
    misfits: set[str]
    """Parameters that do not fit."""


class Restoration:
    """The actions that bring a run into a checkpoint's state, as the sections plan them."""

    def __init__(self, run: Run, checkpoint: Checkpoint, *, strict: bool) -> None:
        world, topology = checkpoint.manifest.world, run.topology
        self.run, self.checkpoint = run, checkpoint
        self.problems = Problems(checkpoint.place, strict)
        self.is_same_world = (world["readers"], world["size"]) == (topology.readers, run.world.size)
        self.own = checkpoint.rank_state(run.world.rank if self.is_same_world else 0)
        """The part of a rank's own file that this rank takes, still encoded."""
        self.units: list[UnitPlan] = []
        """The units that both sides have. The section `models` adds them."""
        self.calls: list[Action] = []
        """Code of other people, which may fail: it runs first."""
        self.copies: list[Action] = []
        """Copies and settings of core, and calls that must come after them."""
        self.reads: list[Callable[[], Iterable[Read]]] = []
        """Tensors in data files that `copies` read."""
        self.extra: dict[str, Any] = {}
        """Values of the caller's own; `apply` fills them in."""

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

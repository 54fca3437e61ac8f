"""The save or load under way, which each section gets."""

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
"""A stored tensor and the leaf that it fills; None if the whole tensor may be read."""


@frozen
class Save:
    """A save that is being collected on this rank."""

    run: Run
    extra: Mapping[str, Any] | None
    """Values of the caller's own."""
    alone: bool
    """True if this rank saves as rank 0 and reader 0 of a world of one."""
    state: State = field(factory=State)


@define(eq=False)
class UnitPlan:
    """A unit of this run, and its state in the checkpoint."""

    unit: Unit
    saved: Mapping[str, Any]
    """The unit's description in the checkpoint, decoded from JSON."""
    leaves: Mapping[str, Leaf]
    """The weights and buffers of this run, by name."""
    model: dict[str, Stored]
    """Stored weights by name, with this run's names of tied weights."""
    optimizer: dict[str, Stored]
    """Stored optimizer tensors by NAME/KEY, with this run's names of tied weights."""
    plugins: dict[str, Stored]
    """Stored tensors of plugins by key."""
    misfits: set[str]
    """Names of weights that do not fit."""


class Restoration:
    """A load under way: the actions that restore a checkpoint's state, which the sections plan."""

    def __init__(self, run: Run, checkpoint: Checkpoint, *, strict: bool) -> None:
        world, topology = checkpoint.manifest.world, run.topology
        self.run, self.checkpoint = run, checkpoint
        self.problems = Problems(checkpoint.place, strict)
        self.is_same_world = (world["readers"], world["size"]) == (topology.readers, run.world.size)
        self.own = checkpoint.rank_state(run.world.rank if self.is_same_world else 0)
        """The encoded content of the rank's own file that this rank restores: rank 0's in another world."""
        self.units: list[UnitPlan] = []
        """The units that both the run and the checkpoint have. The section `models` adds them."""
        self.calls: list[Action] = []
        """Calls of other people's code, which run first because they may fail."""
        self.copies: list[Action] = []
        """Copies and assignments by core, and calls that must follow them."""
        self.reads: list[Callable[[], Iterable[Read]]] = []
        """Functions that return the stored tensors that `copies` read from data files."""
        self.extra: dict[str, Any] = {}
        """Values of the caller's own; `apply` fills them in."""

    def plan_call(self, what: str, encoded: Any, take: Callable[[Any], object]) -> None:
        """Plan to call `take` with the decoded value; raise now if the value cannot be decoded."""
        self.calls.append((what, partial(take, self.checkpoint.decode(encoded, what))))

    def plan_copy(self, what: str, leaves: Mapping[str, Leaf], saved: Mapping[str, Stored]) -> set[str]:
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
        """Return the blocks that `apply` reads; values of objects have been read already."""
        return self.checkpoint.blocks_of(read for reads in self.reads for read in reads())

    def apply(self) -> None:
        """Run all actions.

        Raises:
            CheckpointError: an action failed; the message names it and the state that has changed before.
        """
        actions = [*self.calls, *self.copies]
        with torch.inference_mode(False), torch.no_grad():  # tensors made here are trained on
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

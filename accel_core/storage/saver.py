"""Save a state: agree on it and snapshot it on all ranks, and start to write it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from attrs import define, field

from accel_core.errors import CheckpointError
from accel_core.storage.commit import begin, cannot_be_saved, discard, new_save_id, overtaken
from accel_core.storage.files import as_json
from accel_core.storage.layout import Layout
from accel_core.storage.pending import Pending, Share
from accel_core.storage.plan import gather_groups, plan
from accel_core.storage.ranks import first_here, firsts

if TYPE_CHECKING:
    from accel_core.storage.protocols import Comm, Storage
    from accel_core.storage.series import Series
    from accel_core.storage.state import State


@define(eq=False)
class _Begun:
    """A save whose folder is made and claimed, with what this rank writes into it."""

    place: Storage
    save_id: str
    claim: ExitStack = field(factory=ExitStack)
    commit: int | None = None
    """The number of its commit."""
    share: Share | None = None


class Saver:
    """Saves the states of the same ranks, again and again: it keeps what one save leaves to the next."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self._layout: Layout | None = None
        self._was_shared = True
        """Of the place that the layout was made for."""
        self._pending: Pending | None = None

    def save(
        self,
        collect: Callable[[], State],
        series: Series,
        place: Storage | None,
        *,
        wait: bool,
        wait_for_previous_save: Callable[[], object],
    ) -> Pending:
        """Save a state in `place`, or as the next of the series. Collective.

        Two rounds of the ranks, and up to two more if a leaf is new. With `wait` it is over when this
        returns, unless it failed, which `Pending.wait` raises. Else a copy was taken, and a thread writes it.

        Args:
            collect: returns this rank's state.
            series: the numbered checkpoints of the run.
            place: None for the next of the series.
            wait: whether this call writes the state.
            wait_for_previous_save: called before `collect`; raises if that save has failed.

        Raises:
            CheckpointError: the save before has failed, something cannot be stored, ranks disagree, or the
                place cannot be written. On all ranks; what was there is unchanged.
        """
        comm, where = self.comm, series.folder if place is None else place
        collected: list[State] = []

        def enter() -> tuple[Any, str | None, int, str]:
            wait_for_previous_save()
            collected.append(state := collect())
            number = series.free_number() if place is None and first_here(comm, where) else series.next_number
            return state.summary_for_ranks, self._name_for(state, where), number, new_save_id()

        summaries, names, numbers, ids = zip(*comm.together("save_state: collect", enter), strict=True)
        (state,), number, save_id = collected, max(numbers), ids[0]
        state.merge_summaries(state, summaries, comm.rank)
        layout = self._plan(names, state, where)
        target = place or where.at(f"checkpoint_{number}")
        shared = self._shared(state, target)
        begun = _Begun(target, save_id)

        def begin_and_copy() -> None:
            begun.commit = self._begin(begun, is_new=place is None)
            body = layout.read(state.leaves) if wait else layout.stage(state.leaves)
            begun.share = Share(comm.rank, layout, body, as_json(state.own), shared)

        try:
            comm.together("save_state: begin", begin_and_copy)
            series.number_from(number + 1)
            named = {"name": target.name if place is None else None, "iteration": number, "save_id": save_id}
            about = {**named, "domains": self._domains(target), **state.members()} if comm.rank == 0 else {}
        except BaseException:  # no memory for the copy, Ctrl-C, another rank: nothing half-written stays
            if begun.commit is not None and first_here(comm, target):
                discard(target, save_id)
            begun.claim.close()
            raise
        committed = series.apply_limit if place is None else _nothing
        return self._write(begun, about, committed, wait=wait)

    def _write(
        self, begun: _Begun, members: Mapping[str, Any], committed: Callable[[], None], *, wait: bool
    ) -> Pending:
        """Write a save that has begun: here, or in a thread."""
        assert begun.commit is not None
        assert begun.share is not None
        mail = self.comm.mailbox(f"save/{begun.save_id}")
        place, shares = begun.place, [begun.share]
        pending = Pending(
            place, begun.save_id, begun.commit, shares, members, begun.claim, self.comm, mail, committed
        )
        self._pending = pending
        if wait:
            with pending.shown():
                pending.run()
        else:
            pending.start()
        return pending

    def wait(self, patience: float | None = None) -> Pending | None:
        """Wait for the save under way; return it, if there is one. As `Pending.wait`."""
        pending = self._pending
        if pending is not None:
            try:
                pending.wait(patience)
            finally:
                if pending.is_over:  # else Ctrl-C has ended the wait only: a thread still reads the copy
                    self._pending = None
        return pending

    def free_memory(self) -> None:
        """Give back the memory of the copy. What a thread still writes, it holds until it has ended."""
        self._layout = None

    def _name_for(self, state: State, where: Storage) -> str | None:
        """Return the name of the layout of the save before, if it serves this state."""
        before = self._layout
        same = before is not None and before.declared == state.declared and self._was_shared == where.shared
        return before.name if before is not None and same else None

    def _plan(self, names: Sequence[str | None], state: State, where: Storage) -> Layout:
        """Return who writes what: as in the save before, if all ranks name its layout, else agreed anew."""
        if self._layout is not None and None not in names and len({*names}) == 1:
            return self._layout
        self._layout = None  # with its buffer, before the next one is made
        comm, self._was_shared = self.comm, where.shared
        nonce, groups = gather_groups(comm, state.declared, lambda: state.check(state))
        disks = [0] * len(comm.nodes) if where.shared else comm.nodes
        writes = plan(groups, comm.rank, disks)
        self._layout = Layout.of(nonce, state.declared, writes, state.leaves)
        return self._layout

    def _shared(self, state: State, target: Storage) -> bytes | None:
        """Return the JSON of what all ranks share, for the first rank of each disk: rank 0's."""
        rank = self.comm.rank
        if target.shared or len({*self.comm.nodes}) == 1:
            return as_json(state.shared) if rank == 0 else None
        texts = self.comm.together("save_state: shared", lambda: as_json(state.shared) if rank == 0 else None)
        return texts[0] if first_here(self.comm, target) else None

    def _begin(self, begun: _Begun, *, is_new: bool) -> int:
        """Make the save's folder, by the first rank of each disk. Returns the number of its commit.

        is_new: it replaces no checkpoint.
        """
        target = begun.place
        if not first_here(self.comm, target):
            return 0
        number = begin(target)
        if is_new and number > 1:
            raise overtaken(target, 1)
        home = target.at(begun.save_id)
        try:
            begun.claim.enter_context(home.claim())
            is_mine = len(home.list()) <= 1
        except OSError as error:
            raise cannot_be_saved(target, error) from error
        if not is_mine:
            raise CheckpointError(
                f"{target} is one folder for several nodes, though project.save_on_each_node says that"
                " each has a disk of its own\nset project.save_on_each_node to false",
                path=str(target),
            )
        return number

    def _domains(self, target: Storage) -> list[list[int]]:
        """Return the ranks of each disk, where there are several."""
        nodes, leading = self.comm.nodes, firsts(self.comm, target)
        if len(leading) == 1:
            return []
        return [[rank for rank, node in enumerate(nodes) if node == nodes[first]] for first in leading]


def _nothing() -> None:
    """Do nothing."""

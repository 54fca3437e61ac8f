"""Save a state: all ranks agree on it, copy it, and start to write it."""

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
    """A save whose folder is created and claimed, with the data that this rank writes."""

    place: Storage
    save_id: str
    claim: ExitStack = field(factory=ExitStack)
    commit: int | None = None
    """Number of the commit; None until the save has begun."""
    share: Share | None = None


class Saver:
    """Saves the states of a group of ranks. Each save reuses the layout and buffers of the save before."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self._layout: Layout | None = None
        self._was_shared = True
        """`shared` of the place for which the layout was made."""
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
        """Save a state in `place`, or as the next checkpoint of the series. Collective.

        The ranks exchange messages twice, up to two more times if leaves have changed, and once more if
        several nodes have disks of their own.

        Args:
            collect: returns this rank's state.
            series: the numbered checkpoints of the run.
            place: None for the next checkpoint of the series.
            wait: True to write the state in this call; False to copy the state and write it in a thread.
            wait_for_previous_save: called before `collect`; raises if the previous save has failed.

        Returns:
            The save. `Pending.wait` raises an error of the writing, also with `wait`.

        Raises:
            CheckpointError: the previous save has failed, a value cannot be stored, ranks disagree, or the
                place cannot be written. Raised on all ranks; an earlier checkpoint is unchanged.
        """
        comm, where = self.comm, series.folder if place is None else place
        collected: list[State] = []

        def enter() -> tuple[Any, str | None, int, str]:
            wait_for_previous_save()
            collected.append(state := collect())
            number = series.free_number() if place is None and first_here(comm, where) else series.next_number
            return state.summary_for_ranks, self._name_for(state, where), number, new_save_id()

        summaries, names, numbers, ids = zip(*comm.together("save_state: collect", enter), strict=True)
        state, number, save_id = collected[0], max(numbers), ids[0]
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
        except BaseException:  # out of memory, Ctrl-C, a failed rank: clean up
            if begun.commit is not None and first_here(comm, target):
                discard(target, save_id)
            begun.claim.close()
            raise
        committed = series.apply_limit if place is None else _nothing
        return self._write(begun, about, committed, wait=wait)

    def _write(
        self, begun: _Begun, members: Mapping[str, Any], committed: Callable[[], None], *, wait: bool
    ) -> Pending:
        """Write a save that has begun, in this thread if `wait` is True, else in a new thread."""
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
        """Wait for the current save, as `Pending.wait` does; return the save, or None without a save."""
        pending = self._pending
        if pending is not None:
            try:
                pending.wait(patience)
            finally:
                if pending.is_over:  # else Ctrl-C has only ended the wait: a thread still reads the copy
                    self._pending = None
        return pending

    def free_memory(self) -> None:
        """Release the memory of the copy. A thread that still writes a copy keeps that copy until it ends."""
        self._layout = None

    def _name_for(self, state: State, where: Storage) -> str | None:
        """Return the name of the previous save's layout if this state can reuse the layout, else None."""
        before = self._layout
        same = before is not None and before.declared == state.declared and self._was_shared == where.shared
        return before.name if before is not None and same else None

    def _plan(self, names: Sequence[str | None], state: State, where: Storage) -> Layout:
        """Return the previous save's layout if all ranks can reuse it; otherwise plan a new layout."""
        if self._layout is not None and None not in names and len({*names}) == 1:
            return self._layout
        self._layout = None  # frees its buffer before the next layout allocates one
        comm, self._was_shared = self.comm, where.shared
        nonce, groups = gather_groups(comm, state.declared, lambda: state.check(state))
        disks = [0] * len(comm.nodes) if where.shared else comm.nodes
        writes = plan(groups, comm.rank, disks)
        self._layout = Layout.of(nonce, state.declared, writes, state.leaves)
        return self._layout

    def _shared(self, state: State, target: Storage) -> bytes | None:
        """Return rank 0's shared state as JSON on the first rank of each disk, None on other ranks."""
        rank = self.comm.rank
        if target.shared or len({*self.comm.nodes}) == 1:
            return as_json(state.shared) if rank == 0 else None
        texts = self.comm.together("save_state: shared", lambda: as_json(state.shared) if rank == 0 else None)
        return texts[0] if first_here(self.comm, target) else None

    def _begin(self, begun: _Begun, *, is_new: bool) -> int:
        """Create and claim the save's folder on the first rank of each disk; return the commit's number.

        Other ranks do nothing and return 0. If `is_new`, the folder must not have a checkpoint yet.
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
            # Only this rank's claim is expected: a second claim means that nodes share the folder.
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
        """Return the ranks of each disk; an empty list if there is only one disk."""
        nodes, leading = self.comm.nodes, firsts(self.comm, target)
        if len(leading) == 1:
            return []
        return [[rank for rank, node in enumerate(nodes) if node == nodes[first]] for first in leading]


def _nothing() -> None:
    """Do nothing."""

"""Collect the state of a run: each section adds its part, then ranks compare summaries."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from xxhash import xxh3_64_hexdigest

from accel_core.checkpoint.sections import SECTIONS
from accel_core.checkpoint.sections.models import require_known_names
from accel_core.errors import CheckpointError
from accel_core.storage.files import as_json

if TYPE_CHECKING:
    from accel_core.checkpoint.tasks import Save
    from accel_core.contract.unit import Unit
    from accel_core.storage.state import State

logger = logging.getLogger(__name__)


class RankSummary(NamedTuple):
    """Summary of a rank's state that all ranks exchange."""

    metrics: Mapping[str, Any]
    """The metrics that the caller passed."""
    units: str
    extra: str
    registered: Sequence[str]
    """Like `units` and `extra`, digests; one per registered object."""


def collect(save: Save, metrics: Mapping[str, Any]) -> State:
    """Return this rank's state of the run.

    Raises:
        CheckpointError: a unit has gradients that are not applied yet, or something cannot be stored.
    """
    run, state = save.run, save.state
    if run.mark_step is not None:
        run.mark_step("state")
    for unit in run.units:
        unit.names.drop_cut_ties()
        if unit.pending or not unit.window.boundary:
            raise _unapplied(unit)
    for section in SECTIONS:
        section.collect(save)
    state.own["reader"] = 0 if save.alone else run.topology.reader
    parts = state.shared["units"], state.shared["extra"], *state.shared["registered"]
    units, extra, *registered = [xxh3_64_hexdigest(as_json(each)) for each in parts]
    state.summary_for_ranks = RankSummary(metrics, units, extra, registered)
    state.merge_summaries, state.check = merge_rank_summaries, partial(require_known_names, run)
    return state


def _unapplied(unit: Unit) -> CheckpointError:
    window = unit.window
    if window.boundary:
        return CheckpointError(
            f"unit {unit.name!r} has gradients that no optimizer has applied, and gradients are not saved\n"
            "save after optimizer.step(), or drop them first with optimizer.zero_grad()"
        )
    return CheckpointError(
        f"unit {unit.name!r} has accumulated {window.index + 1} of {window.size} micro-batches, and"
        " partial gradients are not saved\n"
        "save after the window's last one: if accelerator.sync_gradients: accelerator.save_state(...)"
    )


def merge_rank_summaries(state: State, summaries: Sequence[RankSummary], rank: int) -> None:
    """Move units that differ from rank 0's (pipeline stages) into this rank's file.

    Registered objects and `extra` are saved with rank 0's values; if other ranks have other values, rank 0
    warns once.

    Raises:
        CheckpointError: metrics or numbers of registered objects differ between ranks. Raised on all ranks.
    """
    first = summaries[0]
    for other, each in enumerate(summaries):
        if each.metrics != first.metrics:
            raise CheckpointError(
                f"save_state: rank 0 has the metrics {first.metrics}, rank {other} has {each.metrics}\n"
                "give all ranks the same: accelerator.reduce(value, 'mean') before the save"
            )
    registered = [len(each.registered) for each in summaries]
    if len({*registered}) > 1:
        listed = "\n".join(f"  rank {other}: {count}" for other, count in enumerate(registered))
        raise CheckpointError(
            f"save_state: ranks have registered different numbers of objects\n{listed}\n"
            "call register_for_checkpointing on all ranks alike"
        )
    if summaries[rank].units != first.units:
        state.own["units"] = state.shared["units"]
    if rank == 0:
        for number, described in enumerate(state.shared["registered"]):
            if len({each.registered[number] for each in summaries}) > 1:
                _warn_of_other_values(f"registered object {number} ({described['class']})")
        if len({each.extra for each in summaries}) > 1:
            _warn_of_other_values("save_state(extra=...)")


@cache
def _warn_of_other_values(what: str) -> None:
    logger.warning(
        "%s has other values on other ranks than on rank 0, whose values are saved; make them equal before"
        " save_state, by reduce for example",
        what,
    )

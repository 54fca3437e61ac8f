# mypy: disable-error-code="empty-body"
"""The hooks that notify plugins of events in a run: trackers implement these.

A plugin that has state of the whole run, such as the id of a tracker's run, has torch's methods `state_dict`,
which core calls on the main process, and `load_state_dict`, which core calls on every rank, also before
`tracking_started`. The state is plain JSON; checkpoints keep it under the plugin's name. State of a unit
belongs to `save_state`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from accel_core.contract.bound import concatenate
from accel_core.contract.spec import spec

if TYPE_CHECKING:
    from pathlib import Path

    from torch.optim import Optimizer

    from accel_core.contract.config import RunConfig
    from accel_core.contract.unit import Unit


# -- events of a run ---------------------------------------------------------------------------------


@spec("observer")
def run_started(run_id: str, config: RunConfig) -> None:
    """Note that the run has started on this rank."""


@spec("observer")
def tracking_started(project: str, config: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Open the project for `init_trackers`, and note `config` (nested, any values).

    This hook and `log` are called on the main process, and on all ranks for a plugin whose attribute
    `main_process_only` is False. `options` is the entry of `init_kwargs` under the plugin's name.
    """


@spec("observer")
def log(values: Mapping[str, Any], step: int | None, options: Mapping[str, Any]) -> None:
    """Log `values` for `accelerator.log`, or raise for values that cannot be logged.

    Mappings in `values` may be nested. Trackers get tensors of one element as numbers; an extension gets the
    tensors, so that it need not wait for the device. `options` is the entry of `log_kwargs` under the
    plugin's name.
    """


@spec("observer")
def noted(kind: Literal["warning", "profile"], text: str) -> None:
    """Note a warning of `get_logger`, or the path of a trace that `accelerator.profile()` has written."""


@spec("wrapper")
def read_batches(batches: Iterator[Any], loader: Any, done: int) -> Iterator[Any]:
    """Return the same batches, to follow how a prepared loader is read.

    Called for each iteration, with the batches of this rank. `loader` is the loader that `prepare` returned.
    `done` is the number of batches of its epoch that were read before.
    """


@spec("observer")
def collective(operation: str, ended: bool) -> None:
    """Note that this rank begins, or has ended, a call in which ranks may wait for each other.

    `operation` is "backward" or "forward_backward" in any world, and in a world of several ranks also gather,
    reduce and the like. Called in each step, so that it may take microseconds only, and must not raise.
    """


@spec("observer", per_step=True)
def after_step(unit: Unit, optimizer: Optimizer, applied: bool) -> None:
    """Follow an optimizer step of the unit; called once per optimizer."""


@spec("observer")
def checkpoint_committed(folder: Path | str, step: int | None) -> None:
    """Note that a save has become the checkpoint `folder`. Called on every rank, in the main thread.

    `folder` is text if it is a URL. Called at once after a save that waits; otherwise when the rank next
    saves, waits for the checkpoint, or ends.
    """


@spec("observer")
def run_ended() -> None:
    """Close all resources: `end_training` was called, or the process exits.

    Trackers of a run that its program dropped are called when the next run is created.
    """


# -- a plugin's description of its unit --------------------------------------------------------------


@spec("everyone", concatenate)
def describe(unit: Unit) -> Sequence[str]:
    """Return lines about the unit for `accelerator.explain()`: how `prepare` changed the unit, and why.

    Called after `prepare`, on any rank by itself; each string is one line.
    """

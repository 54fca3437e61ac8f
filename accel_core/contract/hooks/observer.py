# mypy: disable-error-code="empty-body"
"""The hooks that tell plugins what happens in a run: trackers implement these.

A plugin that has state of the whole run, such as the id of a tracker's run, has torch's methods `state_dict`,
which core calls on the main process, and `load_state_dict`, which it calls on every rank, also before
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


# -- what happens in a run ---------------------------------------------------------------------------


@spec("observer")
def run_started(run_id: str, config: RunConfig) -> None:
    """Note that the run is up on this rank."""


@spec("observer")
def tracking_started(project: str, config: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Open the project for `init_trackers`, and note `config` (nested, any values).

    This hook and `log` are called on the main process, and on all ranks for a plugin whose attribute
    `main_process_only` is False. `options`: the entry of `init_kwargs` under the plugin's name.
    """


@spec("observer")
def log(values: Mapping[str, Any], step: int | None, options: Mapping[str, Any]) -> None:
    """Log for `accelerator.log`, or raise for values that cannot be logged.

    `values`: mappings may be nested. For trackers, tensors of one element have become numbers; an extension
    gets the tensors, so that it need not wait for the device. `options`: the entry of `log_kwargs` under the
    plugin's name.
    """


@spec("observer")
def noted(kind: Literal["warning", "profile"], text: str) -> None:
    """Note a warning of `get_logger`, or the path of a trace that `accelerator.profile()` has written."""


@spec("wrapper")
def read_batches(batches: Iterator[Any], loader: Any, done: int) -> Iterator[Any]:
    """Return the same batches, to follow how a prepared loader is read.

    Called for each iteration, with the batches of this rank. `loader`: what `prepare` returned. `done`:
    batches of its epoch that were read before.
    """


@spec("observer")
def collective(operation: str, ended: bool) -> None:
    """Note that this rank begins, or has ended, a call in which ranks may wait for each other.

    operation: "backward" or "forward_backward", in any world; in a world of several also gather, reduce and
    the like. Called in each step, so that it may take microseconds only, and must not raise.
    """


@spec("observer", per_step=True)
def after_step(unit: Unit, optimizer: Optimizer, applied: bool) -> None:
    """Follow an optimizer step of the unit; called once per optimizer."""


@spec("observer")
def checkpoint_committed(folder: Path | str, step: int | None) -> None:
    """Note that a save has become the checkpoint `folder`. Every rank, main thread.

    A URL is text. Called at once after a save that waits; otherwise when the rank next saves, waits for the
    checkpoint, or ends.
    """


@spec("observer")
def run_ended() -> None:
    """Close what is open: `end_training` was called, or the process exits.

    Trackers of a run that its program dropped are called when the next run is made.
    """


# -- what a plugin says of its unit ------------------------------------------------------------------


@spec("everyone", concatenate)
def describe(unit: Unit) -> Sequence[str]:
    """Return lines about the unit for `accelerator.explain()`.

    They say how `prepare` changed the unit, and why. Called after `prepare`, on any rank by itself; each
    string is one line.
    """

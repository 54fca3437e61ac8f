"""Checks that raise instead of waiting forever if only some readers have a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Literal

import torch

from accel_core.errors import AccelError

if TYPE_CHECKING:
    from torch import nn

    from accel_core.contract.run import Run
    from accel_core.contract.unit import Unit


def check_unit(run: Run, unit: Unit, what: Literal["forward", "backward"], *, trains: bool) -> None:
    """Refuse a call that would wait for readers that do not have the innermost loop's batch.

    `trains` says whether gradients are computed.

    Raises:
        AccelError: names loader, batch and strategy.
    """
    if not run.active_loaders or not (loader := run.active_loaders[-1]).is_unshared:
        return
    waits = (what == "forward" and unit.forward_is_collective) or (trains and _waits_in_training(run, unit))
    if not waits or unit.step_state.uneven:
        return
    if loader.shared_by == "dataset":
        reason, remedy = "the data shares itself out", "give each reader as many batches"
    else:
        reason, remedy = "data.even_batches is off", "set data.even_batches"
    raise AccelError(
        f"{what}{loader.place} of the dataloader of {type(loader.dataset).__name__}: not all of"
        f" {run.topology.readers} readers have this batch ({reason}), and {unit.strategy!r}"
        " would hang waiting for the others\n"
        f"train inside `with accelerator.join_uneven_inputs([model]):`, or {remedy}; evaluate"
        " under torch.no_grad()"
    )


def refuse_items(units: Iterable[Unit]) -> None:
    """Refuse to count items in units whose ranks do not reduce gradients together."""
    for unit in units:
        state = unit.step_state
        if unit.run.world.size > 1 and (state.uneven or state.no_sync_depth):
            where = "join_uneven_inputs" if state.uneven else "LocalSGD or no_sync"
            raise AccelError(
                f"windows(items=...) inside {where}: items are those of all ranks, and a rank may have run"
                " out of batches, or keep its gradients to itself\n"
                "leave items out, and take losses that are means"
            )


def _waits_in_training(run: Run, unit: Unit) -> bool:
    """Return True if training the unit waits for ranks that do not have this batch.

    A strategy that reduces at a window's end waits there, each rank with its own last batch. So only a window
    that the other ranks have not begun would hang.
    """
    if not unit.optimizers or unit.is_in_no_sync:
        return False
    in_each_backward = unit.steps.no_sync is None or run.config.accumulation.sync_each_batch
    at_window_end = unit.steps.reduce_gradients is not None or not in_each_backward
    others_began_window = run.accumulation is not None and unit.window.index > 0
    return not (at_window_end and others_began_window)


@contextmanager
def checking_forwards(run: Run) -> Iterator[None]:
    """Return a context that checks each forward of a prepared model.

    Enter it while this rank holds a batch that other ranks do not have.
    """
    with ExitStack() as hooks:
        if run.world.size > 1:
            from accel_core.contract.step_hook import before_forward  # late: most runs never come here

            for unit in run.units:
                before = _check_forward(run, unit)
                for model in unit.wrapped:
                    # First: strategies that shard communicate in such hooks too.
                    hooks.callback(before_forward(model, before))
        yield


def _check_forward(run: Run, unit: Unit) -> Callable[[nn.Module], None]:
    def before(module: nn.Module) -> None:
        # Strategies may synchronize buffers between ranks in any forward with gradients enabled.
        trains = module.training or next(module.buffers(), None) is not None
        check_unit(run, unit, "forward", trains=torch.is_grad_enabled() and trains)

    return before  # a closure: a deep copy of the model shares it, since a run cannot be copied

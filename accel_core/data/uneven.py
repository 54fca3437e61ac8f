"""A batch that not every reader has: who trains on it would wait for the others for ever, and is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch

from accel_core.errors import AccelError

if TYPE_CHECKING:
    from torch import nn

    from accel_core.contract.run import Run
    from accel_core.contract.unit import Unit

__all__ = ["check_unit", "refusing"]


class Loader(Protocol):
    """What is said of a loader in an error, and whether others have its current batch."""

    dataset: Any

    @property
    def place(self) -> str:
        """The number of the epoch and of the batch, for people."""

    @property
    def is_unshared(self) -> bool:
        """Whether not all readers have the batch that was handed out last."""


@contextmanager
def refusing(run: Run, loader: Loader) -> Iterator[None]:
    """While this rank holds such a batch, what would wait for the others raises."""
    with ExitStack() as stack:
        if run.world.size > 1:
            for unit in run.units:
                before = _forward(run, loader, unit)
                for model in unit.wrapped:
                    # First: strategies that shard communicate in such hooks too.
                    stack.callback(model.register_forward_pre_hook(before, prepend=True).remove)
        yield


def _forward(run: Run, loader: Loader, unit: Unit) -> Callable[[nn.Module, Any], None]:
    def before(module: nn.Module, inputs: Any) -> None:
        if unit.gathers:
            _refuse(run, loader, unit, "forward")
        # Strategies may make buffers alike in any forward that could be trained on.
        if torch.is_grad_enabled() and (module.training or next(module.buffers(), None) is not None):
            _training(run, loader, unit, "forward")

    return before  # a closure: copies of the model share it, where they could not copy the run


def check_unit(run: Run, unit: Unit, *, trains: bool) -> None:
    """Raises AccelError: not every reader holds a batch, and the unit would wait for the others."""
    if not run.active_loaders or not (loader := run.active_loaders[-1]).is_unshared:
        return
    if trains:
        _training(run, loader, unit, "backward")
    elif unit.gathers:
        _refuse(run, loader, unit, "forward")


def _training(run: Run, loader: Loader, unit: Unit, what: str) -> None:
    # Who reduces at a window's end only does so with each rank's own last batch, if all have begun it.
    each = unit.steps.no_sync is None or run.config.accumulation.sync_each_batch
    once = unit.steps.reduce_gradients is not None or not each
    begun = once and run.accumulation is not None and unit.window.index > 0
    if unit.optimizers and not unit.silent and not begun:
        _refuse(run, loader, unit, what)


def _refuse(run: Run, loader: Loader, unit: Unit, what: str) -> None:
    if unit.joined or run.active_loaders[-1] is not loader:  # a loop within this one has batches of its own
        return
    raise AccelError(
        f"{what}{loader.place} of the dataloader of {type(loader.dataset).__name__}: not all of"
        f" {run.topology.readers} readers have this batch (data.even_batches is off), and {unit.strategy!r}"
        f" would wait for the others in vain\n"
        "train inside `with accelerator.join_uneven_inputs([model]):`, or set data.even_batches; evaluate"
        " under torch.no_grad()"
    )

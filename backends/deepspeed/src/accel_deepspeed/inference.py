"""Engines that train nothing, and forwards under `torch.inference_mode`."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from accel_core import AccelError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from torch.optim import Optimizer

    from accel_core import Unit

__all__ = ["refuse_steps", "run_without_graph"]


def refuse_steps(unit: Unit) -> Callable[[], None]:
    """Raise where an optimizer steps weights of a unit that has none.

    The returned function ends it. Nothing reduces such gradients: each rank would train a model of its own.
    """
    found, mine = ref(unit), {id(parameter) for parameter in unit.models[0].parameters()}

    def check(optimizer: Optimizer, *call: Any) -> None:
        unit = found()
        if unit is None or unit.optimizers:
            return
        if any(id(parameter) in mine for group in optimizer.param_groups for parameter in group["params"]):
            raise AccelError(
                f"the {type(optimizer).__name__} steps weights of unit {unit.name!r}, which was prepared"
                " without an optimizer: DeepSpeed does not reduce its gradients\n"
                "prepare the optimizer too: model, optimizer = accelerator.prepare(model, optimizer)"
            )

    return register_optimizer_step_pre_hook(check).remove


def run_without_graph(model: nn.Module) -> Callable[[], None]:
    """Run forwards of the model under `inference_mode` as under `no_grad`.

    The returned function ends it. Weights that DeepSpeed gathers and releases under `inference_mode` are
    inference tensors from then on, through which torch computes no gradient.
    """
    entered: list[ExitStack] = []

    def enter(*call: Any) -> None:
        entered.append(ExitStack())
        if torch.is_inference_mode_enabled():
            entered[-1].enter_context(torch.inference_mode(False))
            entered[-1].enter_context(torch.no_grad())

    def leave(*call: Any) -> None:
        if entered:  # it is called too where a hook before `enter` failed
            entered.pop().close()

    first = model.register_forward_pre_hook(enter, prepend=True)
    last = model.register_forward_hook(leave, always_call=True)

    def end() -> None:
        first.remove()
        last.remove()

    return end

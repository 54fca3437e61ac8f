"""The granularity of an optimizer: the smallest part of a model that the optimizer can step by itself."""

from __future__ import annotations

import copy
import inspect
import warnings
from contextlib import suppress
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from accel_core.training.prior_state import has_state

Granularity = Literal["element", "tensor", "model"]
_STEPS: Final = 10
"""Enough steps for optimizers that adapt to all parameters, such as Prodigy, to show that they do."""


def requires_closure(optimizer: Optimizer) -> bool:
    """Return whether `step` requires a closure, which evaluates the loss several times, as for LBFGS."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def optimizer_like(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """Return an optimizer with the same rule for other tensors, with a state and hooks of its own.

    Args:
        optimizer: the optimizer whose class, defaults and other attributes the result has.
        groups: parameter groups of the result; hyperparameters that a group lacks are the defaults.
    """
    if any(optimizer.state.values()) and not has_state(optimizer):  # Adagrad's constructor creates the state
        return type(optimizer)(groups, **optimizer.defaults)
    made = object.__new__(type(optimizer))
    vars(made).update(vars(optimizer))  # what the rule needs beside the groups
    vars(made).pop("step", None)  # torch's schedulers put a method of the first optimizer there
    Optimizer.__init__(made, groups, optimizer.defaults)
    return made


def step_granularity(optimizer: Optimizer, device: torch.device) -> Granularity:
    """Return the smallest part of a model that the optimizer steps as it would in the whole model.

    Strategies split parameters over ranks, and each rank steps its parts with an optimizer of its own. The
    answer comes from no list of names: copies of the optimizer step small random tensors, once whole and once
    in parts, and the results are compared. The program's parameters, state and random streams stay as they
    are. A program can declare the answer instead: `optimizer.elementwise = True`, or False for an optimizer
    whose rule begins after many steps. Not collective; equal optimizers get equal answers on all ranks.

    Args:
        optimizer: any optimizer, before or after its first step.
        device: the device that the optimizer will step on.

    Returns:
        "element": ranges of flattened tensors, as with AdamW and most optimizers. "tensor": whole tensors, as
        with Muon and LAMB. "model": all parameters together, as with Prodigy; also an optimizer that cannot
        step small tensors without a closure, so that nothing is known about it.
    """
    if getattr(optimizer, "elementwise", False):
        return "element"
    # The copy of a wrapper would step the real parameters, by the optimizer inside.
    if any(hasattr(value, "param_groups") for value in vars(optimizer).values()):
        return "model"
    streams = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(streams, device_type=device.type), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            return _measure(optimizer, device)
        except Exception:  # the optimizer is not our code, and may refuse such tensors in any way
            return "model"


def _measure(optimizer: Optimizer, device: torch.device) -> Granularity:
    """Step tensors of shape (groups of the optimizer, 2, 4, 6) whole, in ranges and one by one."""
    random, shape = torch.Generator().manual_seed(0), (len(optimizer.param_groups), 2, 4, 6)
    weights = 0.01 * torch.randn(shape, generator=random)
    gradients = torch.randn(shape, generator=random) + 0.3 * torch.randn(_STEPS, *shape, generator=random)
    gradients[..., 1, :2, :] *= 5  # so that the parts have different norms
    weights, gradients = weights.to(device), gradients.to(device)
    whole = _updates(optimizer, weights, gradients)
    if not hasattr(optimizer, "elementwise"):
        with suppress(Exception):  # raised by an optimizer of matrices, such as Muon
            halves = zip(weights.flatten(2).split(12, -1), gradients.flatten(3).split(12, -1), strict=True)
            parts = torch.cat([_updates(optimizer, *half) for half in halves], -1)
            if _are_close(parts.view_as(whole), whole):
                return "element"
    singles = zip(weights.split(1, 1), gradients.split(1, 2), strict=True)
    return (
        "tensor"
        if _are_close(torch.cat([_updates(optimizer, *one) for one in singles], 1), whole)
        else "model"
    )


def _updates(optimizer: Optimizer, weights: Tensor, gradients: Tensor) -> Tensor:
    """Return the changes by which a copy of the optimizer steps these weights."""
    parameters = [nn.Parameter(each.clone()) for each in weights.flatten(0, 1)]
    own = zip(*[iter(parameters)] * weights.shape[1], strict=True)
    groups = [
        {**_hyperparameters(group), "params": list(each)}
        for group, each in zip(optimizer.param_groups, own, strict=True)
    ]
    trial = optimizer_like(optimizer, groups)
    usual = vars(Optimizer(parameters, {}))
    extra = {name: value for name, value in vars(trial).items() if name not in usual}
    vars(trial).update(copy.deepcopy(extra))  # such as a history of steps, which the trial would add to
    step = inspect.unwrap(type(optimizer).step)  # without hooks that are registered for all optimizers
    for of_step in gradients:
        for parameter, gradient in zip(parameters, of_step.flatten(0, 1), strict=True):
            parameter.grad = gradient.clone()
        step(trial)
    return torch.stack([*parameters]).detach().view_as(weights) - weights


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    """Copy a group without its parameters; a learning rate of 0, from which a warm-up begins, is raised."""
    copied = copy.deepcopy(
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
    )
    if copied.get("lr") is not None and not copied["lr"]:
        copied["lr"] = copied["lr"] + 0.01
    return copied


def _are_close(parts: Tensor, whole: Tensor) -> bool:
    """Compare updates up to rounding; False for an optimizer that changed nothing."""
    largest = whole.abs().max()
    return bool(largest > 0) and bool((parts - whole).abs().max() <= 0.01 * largest)

"""Windows, clipping and metrics, by Accelerate's rules."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

import accel_core
from accel_compat.notices import warn_once
from accel_compat.state.operations import all_tensors, recursively_apply
from accel_core import AccelError, ops

_EMPTY = "the iterable of parameters is empty (a generator that was used up?); nothing is clipped"


def name_models(accelerator: Any, given: Iterable[Any]) -> tuple[Any, ...]:
    """Return the prepared ones of these models, which count for themselves from now on."""
    several = (each if isinstance(each, (list, tuple)) else [each] for each in given)
    is_prepared = accelerator.run.prepared.unit_of_model
    models = tuple(model for each in several for model in each if is_prepared(model) is not None)
    if models:
        accelerator._followers.name(accelerator.run, models)
    return models


# -- clipping ------------------------------------------------------------------------------------


def clip_norm(accelerator: Any, parameters: Any, max_norm: float, norm_type: float) -> Any:
    """Clip all parameters to a norm; return the norm before."""
    mine = _listed(parameters)
    try:
        norm = accel_core.Accelerator.clip_grad_norm_(accelerator, mine, max_norm, norm_type)
    except AccelError as error:
        if _may_clip(accelerator, "clip_grad_norm_", mine, error):
            return torch.nn.utils.clip_grad_norm_(mine, max_norm, norm_type)
        norm = None
    if norm is not None:
        return norm
    return torch.nn.utils.get_total_norm([each.grad for each in mine if each.grad is not None], norm_type)


def clip_value(accelerator: Any, parameters: Any, value: float) -> None:
    """Clamp each gradient at the end of a window."""
    mine = _listed(parameters)
    try:
        accel_core.Accelerator.clip_grad_value_(accelerator, mine, value)
    except AccelError as error:
        if _may_clip(accelerator, "clip_grad_value_", mine, error):
            torch.nn.utils.clip_grad_value_(mine, value)


def _may_clip(accelerator: Any, name: str, parameters: list[Any], error: AccelError) -> bool:
    """Unscale parameters that core refused, as they are not those of one unit.

    Returns False inside a window, and where there are none. Raises any other error.
    """
    units = accelerator.run.prepared.units_of(parameters)
    if len(units) == 1 and None not in units:
        raise error
    if not parameters:
        warn_once(f"{name}: {_EMPTY}")
    if not parameters or not all(unit is None or unit.window.boundary for unit in units):
        return False
    divided = accelerator.is_divided or accelerator.run.mesh is not None
    if divided or any(unit is not None and unit.mesh is not None for unit in units):
        names = ", ".join(sorted("no unit" if unit is None else unit.name for unit in units))
        raise AccelError(
            f"clipping: these {len(parameters)} parameters belong to {names}, and ranks hold parts of"
            " them\nclip the parameters of each prepared model in a call of its own"
        )
    prepared = accelerator.run.prepared.optimizers
    accelerator.unscale_gradients([proxy for _, proxy in prepared if proxy.unit in units])
    return True


# -- metrics -------------------------------------------------------------------------------------


def gather_for_metrics(accelerator: Any, data: Any, use_gather_object: bool) -> Any:
    """Gather, and cut to the number of samples that the loader's last round has. Collective."""
    run = accelerator.run
    as_objects = use_gather_object or not all_tensors(data)
    real_readers = run.active_loaders[-1].real_readers if run.active_loaders else -1
    if not accelerator.use_distributed:
        found = data
    elif as_objects:
        of_ranks = ops.gather_object([data], run=run)
        found = _joined(of_ranks[: real_readers if real_readers >= 0 else None])
    else:
        found = accel_core.Accelerator.gather_for_metrics(accelerator, data)
    length = _samples(accelerator)
    if length < 0 or real_readers >= 0:
        return found
    try:
        return found[:length] if as_objects else recursively_apply(lambda each: each[:length], found)
    except (IndexError, KeyError, TypeError):  # there is nothing in it to count, as of a number
        return found


def _samples(accelerator: Any) -> int:
    """Count the last round's real samples over all ranks; -1 if unknown or all."""
    loaders, state = accelerator.run.active_loaders, accelerator.gradient_state
    known: int = loaders[-1].remainder if loaders else -1
    ended = state.end_of_dataloader and state.remainder > 0
    return known if known >= 0 else state.remainder if ended else -1


class LocalSGD(accel_core.LocalSGD):
    """A context in which ranks step alone, and average weights now and then."""

    def step(self) -> None:
        """Count a call, micro-batches too; average after each `local_sgd_steps` of them.

        Collective when it averages.
        """
        if self.enabled and not self.unit.window.boundary:
            self.count()
        super().step()


def _listed(parameters: Any) -> list[Any]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def _joined(each: list[Any]) -> list[Any]:
    try:
        return [item for given in each for item in given]
    except TypeError:  # numbers, None: one of each rank
        return each

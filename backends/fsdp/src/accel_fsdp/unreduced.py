"""Gradients of version 1 that a context no_sync has kept from being reduced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817  as everybody calls it

from accel_core import AccelError
from accel_fsdp.flat_vectors import name_parameters

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from accel_core import Unit

__all__ = ["Unreduced"]

_places: Final[WeakKeyDictionary[nn.Module, list[tuple[ref[Any], int]]]] = WeakKeyDictionary()
"""torch's flat vectors with parameters of each module, and which these are."""


class Unreduced:
    """The flat vectors of a unit whose gradients are this rank's alone.

    A backward in no_sync adds a vector, the next one that reduces its gradient removes it. A vector stays
    where no later backward runs its module.
    """

    def __init__(self) -> None:
        self._handles: set[Any] = set()
        self._followed: WeakSet[Any] = WeakSet()

    def follow(self, model: nn.Module) -> None:
        """Note each reduction of the model's gradients.

        Have `zero_grad` of the model and of its parts see gradients that torch keeps aside.
        """
        for module in FSDP.fsdp_modules(model):
            handle: Any = module._handle
            if handle is not None:
                # torch calls it after each reduction, and nowhere else.
                vars(handle)["_reset_is_grad_none"] = partial(
                    self._reduced, handle, handle._reset_is_grad_none
                )
                # torch calls it after each backward that does not reduce.
                vars(handle)["_use_unsharded_grad_views"] = partial(
                    _show, handle, handle._use_unsharded_grad_views
                )
                # torch calls it before each gathering, to take over what the user has changed.
                # In a window a vector's gradient is of another size, which cannot be traced.
                take_over = torch.compiler.disable(_take_over)
                vars(handle)["_writeback_orig_params"] = partial(
                    take_over, handle, handle._writeback_orig_params
                )
                _note_places(handle)
                self._followed.add(handle)
        for part in model.modules():
            vars(part)["zero_grad"] = partial(_zero_grad, part)
            vars(part)["requires_grad_"] = partial(_requires_grad, part)

    @contextmanager
    def kept_in(self, models: Sequence[nn.Module]) -> Iterator[None]:
        """Note the vectors that get gradients inside, where nothing is reduced."""
        try:
            yield
        finally:
            modules = [part for model in models for part in FSDP.fsdp_modules(model)]
            handles: list[Any] = [module._handle for module in modules if module._handle is not None]
            # torch sets the mark in each backward, and clears it in those that reduce.
            self._handles.update(h for h in handles if getattr(h.flat_param, "_post_backward_called", False))

    def _reduced(self, handle: Any, reset: Callable[[], None]) -> None:
        self._handles.discard(handle)
        reset()

    def clear(self, optimizer: Optimizer) -> None:
        """Zero what torch keeps aside of the optimizer's reduced gradients."""
        aside = [handle for handle in self._followed if any(each is not None for each in _kept_aside(handle))]
        if aside:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            for handle in aside:
                _clear_reduced(handle, parameters)

    def refuse(self, unit: Unit, optimizer: Optimizer, *arguments: Any) -> None:
        """Refuse a step by gradients of this rank alone. Raises AccelError."""
        if not self._handles:
            return
        named = unit.named_parameters().items()
        alone = {p for handle in self._handles for p in handle.flat_param._params}
        names = [name for name, p in named if p in alone and p.grad is not None]
        if names:
            raise AccelError(
                f"unit {unit.name!r}: the last backward through {names[0]} ran inside no_sync, so its"
                f" gradient is not reduced ({len(names)} such parameter(s)); each rank would train a model of"
                " its own\n"
                "run the last backward before a step outside no_sync; in accumulate, let the last micro-batch"
                " go through all of the model"
            )
        self._handles.clear()


def _show(handle: Any, show: Callable[[], None]) -> None:
    """Let parameters have the gradients that a backward gave.

    Where earlier ones were dropped, torch does so after reductions alone.
    """
    show()
    if handle._training_state.name == "BACKWARD_POST":
        type(handle)._reset_is_grad_none(handle)


@torch.no_grad()
def _take_over(handle: Any, take_over: Callable[[], bool]) -> bool:
    """Zero what was dropped (`grad = None`) of a vector that is not reduced yet.

    torch takes it for a rank's part, and zeroes elements of others.
    """
    flat = handle.flat_param
    if handle.uses_sharded_strategy and handle.is_sharded(flat):
        _clear_reduced(handle, [parameter for parameter in flat._params if parameter.grad is None])
        kept = flat.grad
        is_whole = kept is not None and kept.size() == flat._unpadded_unsharded_size
        views = handle._get_unflat_views(kept) if is_whole else repeat(None)
        for parameter, view in zip(flat._params, views, strict=False):
            if parameter.grad is None and view is not None:
                view.zero_()
                parameter.grad = torch.empty_like(parameter)
                parameter.grad.data = view
    return take_over()


@torch.no_grad()
def _clear_reduced(handle: Any, parameters: Iterable[nn.Parameter]) -> None:
    """Zero what these parameters have of earlier reductions."""
    flat, cleared = handle.flat_param, set(parameters)
    for reduced in _kept_aside(handle):
        for parameter, place in zip(flat._params, flat._shard_param_infos, strict=True):
            if reduced is not None and parameter in cleared and place.in_shard:
                reduced[place.offset_in_shard :][: place.numel_in_shard].zero_()


def _kept_aside(handle: Any) -> tuple[Any, Any]:
    """Return sums of reductions that `parameter.grad = None` does not drop, or None.

    torch keeps one from a backward in no_sync on, and one where a forward has left weights gathered.
    """
    flat = handle.flat_param
    kept = flat.grad if handle.uses_sharded_strategy and handle._skipped_use_sharded_views else None
    is_part = kept is not None and kept.size() == flat._local_shard.size()
    return getattr(flat, "_saved_grad_shard", None), kept if is_part else None


def _note_places(handle: Any) -> None:
    flat = handle.flat_param
    infos = [(info.module, info.param_name) for info in flat._param_infos]
    numbers = {place: number for number, place in enumerate(infos)}
    shared = [(each.module, (each.prim_module, each.prim_param_name)) for each in flat._shared_param_infos]
    for holder, place in (*((place[0], place) for place in infos), *shared):
        _places.setdefault(holder, []).append((ref(handle), numbers[place]))


def _zero_grad(module: nn.Module, set_to_none: bool = True) -> None:
    places = [*_places_in(module)]
    for handle, _ in places:
        name_parameters(handle)
    type(module).zero_grad(module, set_to_none)
    for handle, number in places:
        _clear_reduced(handle, [handle.flat_param._params[number]])


def _requires_grad(module: nn.Module, requires_grad: bool = True) -> nn.Module:
    for handle, _ in _places_in(module):
        name_parameters(handle)
    return type(module).requires_grad_(module, requires_grad)


def _places_in(module: nn.Module) -> Iterator[tuple[Any, int]]:
    for each, number in (place for holder in module.modules() for place in _places.get(holder, ())):
        handle = each()
        if handle is not None:
            yield handle, number

"""The objects that a run has prepared, found by the original or the prepared form."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from accel_core.training.names import inside

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import nn
    from torch.optim import Optimizer

    from accel_core.contract.unit import Unit

_GIVEN: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()
"""Wrapped model of any run -> the user's module inside."""
_VIEWED: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()
"""View of a prepared model -> the user's module, whose tensors it shares."""


def given_of(model: nn.Module) -> nn.Module:
    """Return the user's module for a wrapped model or a view of one; other modules are returned unchanged."""
    found: nn.Module = _behind(_behind(model, _VIEWED), _GIVEN)
    return found


def _behind(model: Any, known: Mapping[nn.Module, weakref.ref[nn.Module]]) -> Any:
    try:
        found = known.get(model)
    except TypeError:  # objects without a hash or weak references are not modules
        return model
    return (found and found()) or model


class PreparedObjects:
    """A run's units, with their optimizers and parameters, and its dataloaders."""

    def __init__(self) -> None:
        self.units: list[Unit] = []
        self.trained: list[Unit] = []
        """The units with optimizers. A new list whenever units change or the run ends."""
        self.optimizers: list[tuple[Optimizer, Any]] = []
        """(the user's optimizer, its proxy from `prepare`)."""
        self.schedulers: list[tuple[Any, Any]] = []
        """(the user's scheduler, its proxy from `prepare`)."""
        self.loaders: list[Any] = []
        """Dataloaders that `prepare` returned."""
        self.ordered: list[Any] = []
        """Wrapped models, optimizers and schedulers, in the order of `prepare`'s arguments."""

    def place_of(self, model: object) -> tuple[Unit, int] | None:
        """Return (unit, number of the model in the unit), or None if the model is not prepared.

        `model` may be any form of the model, its `torch.compile`, or a view that `note_view` has recorded.
        """
        form = inside(model)
        return self._place(model) or self._place(form) or self._place(_behind(form, _VIEWED))

    def _place(self, model: object) -> tuple[Unit, int] | None:
        for unit in self.units:
            for forms in (unit.wrapped, unit.models, unit.given):
                for number, form in enumerate(forms):
                    if form is model:
                        return unit, number
        return None

    def note_view(self, view: nn.Module, model: nn.Module) -> None:
        """Record a view that shares the tensors of a prepared model, so that `place_of` finds it."""
        if (place := self.place_of(model)) is not None and self.place_of(view) is None:
            unit, number = place
            _VIEWED[view] = weakref.ref(unit.given[number])

    def unit_of_model(self, model: object) -> Unit | None:
        """Return a model's unit, or None. `model`: as for `place_of`."""
        place = self.place_of(model)
        return None if place is None else place[0]

    def inside_copy(self, model: nn.Module, keep_compiled: bool = True) -> nn.Module:
        """Return the module inside a copy of a prepared model, or a model prepared before `free_memory`.

        Other models are returned unchanged.

        Args:
            model: a model that this run does not hold.
            keep_compiled: False returns an eager view if the module is compiled.
        """
        model = given_of(model)
        pairs = (
            (form, unit.hooks.unwrap_model(unit, form, True))
            for form in (model, inside(model))
            for unit in self.units
        )
        inner: nn.Module = next((found for form, found in pairs if found is not form), model)
        for unit in () if keep_compiled else self.units:
            inner = unit.hooks.unwrap_model(unit, inner, False)
        return inner

    def scheduler_of(self, scheduler: object) -> Any:
        """Return the proxy of a scheduler, original or prepared; None for other objects."""
        for given, proxy in self.schedulers:
            if scheduler is given or scheduler is proxy or scheduler is proxy.scheduler:
                return proxy
        return None

    def proxy_of(self, optimizer: object) -> Any:
        """Return the proxy of an optimizer, original or prepared; None for other objects."""
        for given, proxy in self.optimizers:
            if optimizer is given or optimizer is proxy or optimizer is proxy.optimizer:
                return proxy
        return None

    def form_of(self, thing: Any) -> Any:
        """Return the prepared form of a model, optimizer or scheduler; None for other objects.

        `thing` may be the original or the prepared object.
        """
        place = self._place(thing)
        if place is None:
            return self.proxy_of(thing) or self.scheduler_of(thing)
        unit, number = place
        return unit.wrapped[number]

    def units_of(self, parameters: Iterable[object]) -> set[Unit | None]:
        """Return the units of these parameters, including parameters that `prepare` has replaced.

        The set contains None if a parameter belongs to no prepared model.
        """
        listed = [*parameters]
        ids = {*map(id, listed)}
        for unit in self.units if ids else ():
            if ids <= unit.names.known.keys():  # fast path: clipping calls this in each step
                return {unit}
        return {
            next((unit for unit in self.units if unit.names.of(each) is not None), None) for each in listed
        }

    def add_unit(self, unit: Unit, optimizers: Iterable[tuple[Optimizer, Any]]) -> None:
        """Add a unit, or new optimizers of a unit. optimizers: (the user's optimizer, its proxy)."""
        if unit not in self.units:
            self.units.append(unit)
        for given, wrapped in zip(unit.given, unit.wrapped, strict=True):
            if wrapped is not given:
                _GIVEN[wrapped] = weakref.ref(given)
        self.optimizers.extend(optimizers)
        self.trained = [trained for trained in self.units if trained.optimizers]

    def add_results(self, objects: Iterable[Any], loaders: Mapping[int, Any]) -> list[Any]:
        """Record and return the results of `prepare` for these objects.

        Args:
            objects: the arguments of `prepare`.
            loaders: id of a user's dataloader -> the prepared dataloader.
        """
        self.loaders += [loader for loader in loaders.values() if loader not in self.loaders]
        results = [loaders[id(thing)] if id(thing) in loaders else self.form_of(thing) for thing in objects]
        known = {id(other) for other in (*self.ordered, *self.loaders)}
        for thing in results:
            if thing is not None and id(thing) not in known:
                self.ordered.append(thing)
                known.add(id(thing))
        return results

    def renew_trained(self) -> None:
        """Replace `trained` by an equal list: contexts of `accumulate` then look their units up again."""
        self.trained = [*self.trained]

    def refuse_steps(self, refuse: Callable[..., Any]) -> None:
        """End training: a call of a prepared optimizer's `step` calls `refuse` from now on."""
        self.trained = []
        for _, proxy in self.optimizers:
            proxy.__dict__["step"] = refuse

    def forget(self) -> None:
        """Forget all objects."""
        for held in (self.units, self.optimizers, self.schedulers, self.loaders, self.ordered):
            held.clear()
        self.trained = []

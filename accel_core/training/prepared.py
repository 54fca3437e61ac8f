"""The objects that a run has prepared, found by what the user holds of them."""

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
    """Return the user's module for what a run has wrapped, or a view of it.

    Any other as it is.
    """
    found: nn.Module = _behind(_behind(model, _VIEWED), _GIVEN)
    return found


def _behind(model: Any, known: Mapping[nn.Module, weakref.ref[nn.Module]]) -> Any:
    try:
        found = known.get(model)
    except TypeError:  # what cannot be hashed, or referred to weakly, is no module
        return model
    return (found and found()) or model


class PreparedObjects:
    """A run's units, with their optimizers and parameters, and its dataloaders."""

    def __init__(self) -> None:
        self.units: list[Unit] = []
        self.trained: list[Unit] = []
        """The units with optimizers: another list whenever units change, or the run ends."""
        self.optimizers: list[tuple[Optimizer, Any]] = []
        """(the user's optimizer, what `prepare` returned for it)."""
        self.schedulers: list[tuple[Any, Any]] = []
        """(the user's scheduler, what `prepare` returned for it)."""
        self.loaders: list[Any] = []
        """Dataloaders that `prepare` returned."""
        self.ordered: list[Any] = []
        """Wrapped models, optimizers and schedulers, in the order given to `prepare`."""

    def place_of(self, model: object) -> tuple[Unit, int] | None:
        """Return a model's unit and its number there.

        Given any form of the model, `torch.compile` of one, or a view that was noted.
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
        """Take the view for the prepared model whose tensors it shares, from now on."""
        if (place := self.place_of(model)) is not None and self.place_of(view) is None:
            unit, number = place
            _VIEWED[view] = weakref.ref(unit.given[number])

    def unit_of_model(self, model: object) -> Unit | None:
        """Return a model's unit, given the user's module or `prepare`'s result for it."""
        place = self.place_of(model)
        return None if place is None else place[0]

    def inside_copy(self, model: nn.Module, keep_compiled: bool = True) -> nn.Module:
        """Return the module inside a copy of a prepared model.

        Inside one of before `free_memory` too; any other model as it is.

        keep_compiled: False gives an eager view of it, if it is compiled.
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
        """Return the proxy of a scheduler, given either of both; None for others."""
        for given, proxy in self.schedulers:
            if scheduler is given or scheduler is proxy or scheduler is proxy.scheduler:
                return proxy
        return None

    def proxy_of(self, optimizer: object) -> Any:
        """Return the proxy of an optimizer, given either of both; None for others."""
        for given, proxy in self.optimizers:
            if optimizer is given or optimizer is proxy or optimizer is proxy.optimizer:
                return proxy
        return None

    def form_of(self, thing: Any) -> Any:
        """Return what `prepare` returned for an object; None for a dataloader.

        Given either of both.
        """
        place = self._place(thing)
        if place is None:
            return self.proxy_of(thing) or self.scheduler_of(thing)
        unit, number = place
        return unit.wrapped[number]

    def units_of(self, parameters: Iterable[object]) -> set[Unit | None]:
        """Return the units of these parameters; None among them for a parameter of no prepared model.

        Parameters that `prepare` has replaced are found as well.
        """
        listed = [*parameters]
        ids = {*map(id, listed)}
        for unit in self.units if ids else ():
            if ids <= unit.names.known.keys():  # clipping asks this in each step
                return {unit}
        return {
            next((unit for unit in self.units if unit.names.of(each) is not None), None) for each in listed
        }

    def add_unit(self, unit: Unit, optimizers: Iterable[tuple[Optimizer, Any]]) -> None:
        """Add a unit, or the optimizers that have joined it.

        optimizers: (the user's, what `prepare` returns for it).
        """
        if unit not in self.units:
            self.units.append(unit)
        for given, wrapped in zip(unit.given, unit.wrapped, strict=True):
            if wrapped is not given:
                _GIVEN[wrapped] = weakref.ref(given)
        self.optimizers.extend(optimizers)
        self.trained = [trained for trained in self.units if trained.optimizers]

    def add_results(self, objects: Iterable[Any], loaders: Mapping[int, Any]) -> list[Any]:
        """Return what `prepare` returns for these objects, and keep its order.

        loaders: id of a given dataloader -> the one that is returned for it.
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
        """Make `trained` another list, by which contexts of `accumulate` notice a change."""
        self.trained = [*self.trained]

    def refuse_steps(self, refuse: Callable[..., Any]) -> None:
        """Train no unit any more: what calls an optimizer's `step` calls `refuse`."""
        self.trained = []
        for _, proxy in self.optimizers:
            proxy.__dict__["step"] = refuse

    def forget(self) -> None:
        """Forget all objects."""
        for held in (self.units, self.optimizers, self.schedulers, self.loaders, self.ordered):
            held.clear()
        self.trained = []

"""A guard against changes to a prepared model: `requires_grad` flags, parameters and parameter groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor

from accel_core.errors import AccelError

if TYPE_CHECKING:
    from torch import nn

    from accel_core.contract.unit import Unit

_TRAINS: Final = attrgetter("requires_grad")


class Changes:
    """The state of a unit at `prepare`, and a check for changes that its strategy cannot follow.

    The strategy's card lists the changes that it can follow: `freezing`, `unfreezing`, `replacing`,
    `regrouping`. Flags and identities are compared, never values.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        offers = unit.offers
        models = [*_prepared(unit)]
        parameters = [*dict.fromkeys(p for model in models for p in model.parameters())]
        self._watched = [
            each for each in parameters if ("freezing" if each.requires_grad else "unfreezing") not in offers
        ]
        self._flags = [*map(_TRAINS, self._watched)]
        held = models if "replacing" not in offers else []
        parts = (each for model in held for part in model.modules() for each in _parts(part))
        self._parts = [each for each in parts if each]
        self._places = _Snapshot(self._parts)
        self._names = [*unit.names.all()] if held else []
        self._groups = _Snapshot([] if "regrouping" in offers or not models else self._group())

    def __bool__(self) -> bool:
        """Return whether the strategy is unable to follow some change, so that `check` compares anything."""
        return bool(self._watched or self._parts or self._groups)

    def check(self) -> None:
        """Raise AccelError for a change that the strategy cannot follow."""
        if [*map(_TRAINS, self._watched)] != self._flags:
            self._refuse_flags()
        if not self._places.is_same(self._parts):
            self._refuse_parts()
        if self._groups and not self._groups.is_same(self._group()):
            self._refuse(
                "parameters were added to the optimizer's groups, taken out or moved to others",
                "group parameters",
            )

    def refuse_group(self) -> None:
        """Raise AccelError if the strategy cannot take further parameter groups."""
        if self._groups:
            self._refuse("add_param_group of an optimizer", "group parameters")

    def note_step(self) -> None:
        """Accept the present parameter groups: an engine may exchange their parameters in a step."""
        if self._groups and not self._groups.is_same(groups := self._group()):
            self._groups = _Snapshot(groups)

    def _group(self) -> list[list[Any]]:
        return [[*group["params"]] for each in self._unit.optimizers for group in each.param_groups]

    def _refuse_flags(self) -> None:
        names = {parameter: name for name, parameter in self._unit.names.all()}
        pairs = zip(self._watched, self._flags, strict=True)
        changes = [each for each, flag in pairs if each.requires_grad != flag]
        trains = changes[0].requires_grad
        was, now, verb = ("frozen", "trained", "unfreeze") if trains else ("trained", "frozen", "freeze")
        count = sum(each.requires_grad == trains for each in changes)
        self._refuse(
            f"{count} parameter(s) were {was} when the model was prepared and are {now} now"
            f" ({names.get(changes[0], 'of another model')})",
            verb,
        )

    def _refuse_parts(self) -> None:
        now = dict(self._unit.names.all())
        lost = [name for name, each in self._names if now.get(name) is not each]
        added = [name for name in now if name not in dict(self._names)]
        if lost or added:
            self._refuse(f"{(lost + added)[0]} was replaced or added", "change the model")
        self._places = _Snapshot(self._parts)  # only a part without parameters has changed: accept it

    def _refuse(self, what: str, verb: str) -> None:
        may_freeze = verb == "unfreeze" and "freezing" in self._unit.offers
        sooner = "freeze them after prepare" if may_freeze else f"{verb} before prepare"
        raise AccelError(
            f"strategy {self._unit.strategy!r} cannot follow a change to unit {self._unit.name!r} after"
            f" prepare: {what}\n"
            f"{sooner}; or call accelerator.free_memory(), {verb}, and prepare model, optimizers and loaders"
            " again"
        )


def _prepared(unit: Unit) -> Iterator[nn.Module]:
    """Yield the models that the strategy has wrapped, or whose replicas it keeps equal over ranks."""
    for model, wrapped in zip(unit.models, unit.wrapped, strict=True):
        if wrapped is not model or unit.run.topology.losses > 1:
            yield model


def _parts(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return module._parameters, module._modules


class _Snapshot:
    """A copy of containers of tensors and modules, to compare with them by identity later.

    Python compares containers element by element: by identity first, then by `==`. For tensors, `==` takes
    one-element tensors of equal value as the same and raises for larger ones. One-element tensors are
    therefore compared by identity once more.
    """

    def __init__(self, containers: Sequence[Any]) -> None:
        self._containers = [dict(each) if isinstance(each, dict) else [*each] for each in containers]
        self._of_one_element = [
            (number, key, value)
            for number, each in enumerate(self._containers)
            for key, value in (each.items() if isinstance(each, dict) else enumerate(each))
            if isinstance(value, Tensor) and value.numel() == 1
        ]

    def __bool__(self) -> bool:
        return bool(self._containers)

    def is_same(self, now: Sequence[Any]) -> bool:
        """Return whether the containers `now` have the same keys and objects as the snapshot."""
        try:
            if now != self._containers:
                return False
        except RuntimeError:  # raised by `==` of two different tensors
            return False
        return all(now[number][key] is value for number, key, value in self._of_one_element)

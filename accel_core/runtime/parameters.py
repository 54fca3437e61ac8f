"""Parameters by identity: the unit and the name of each."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from accel_core.contract.unit import Unit

    _Known = tuple[weakref.ref[nn.Parameter], Unit, str]

__all__ = ["Homes"]


class Homes:
    """Which unit a parameter belongs to, and under which name; by identity, old and new ones."""

    def __init__(self) -> None:
        self._units: dict[int, Unit] = {}
        self._names: dict[int, str] = {}
        self._alive: dict[int, weakref.ref[nn.Parameter]] = {}

    def add(self, parameter: nn.Parameter, unit: Unit, name: str) -> None:
        """Remember that `parameter` is, or was, `name` of `unit`."""
        key = id(parameter)
        self._units[key], self._names[key] = unit, name
        self._alive[key] = weakref.ref(parameter, lambda _: self._drop(key))

    def settle(self, unit: Unit) -> None:
        """Remember all parameters that the unit has now."""
        for name, parameter in unit.all_names():
            self.add(parameter, unit, name)

    def units_of(self, parameters: Iterable[object]) -> set[Unit | None]:
        """Their units; None among them for what no prepared model has."""
        return set(map(self._units.get, map(id, parameters)))

    def name_of(self, parameter: nn.Parameter) -> str:
        """The canonical name of a parameter that has a unit."""
        return self._names[id(parameter)]

    def copy(self) -> list[_Known]:
        """What is known now, for `restore`."""
        return [(alive, self._units[key], self._names[key]) for key, alive in self._alive.items()]

    def restore(self, known: Iterable[_Known]) -> None:
        """Know what was known when this copy was made, and nothing else."""
        self.forget()
        for alive, unit, name in known:
            parameter = alive()
            if parameter is not None:
                self.add(parameter, unit, name)

    def forget(self) -> None:
        """Drop everything."""
        for key in list(self._alive):
            self._drop(key)

    def _drop(self, key: int) -> None:
        # Another object may get the number of one that is gone.
        for table in (self._units, self._names, self._alive):
            table.pop(key, None)

"""Parameters by identity: the unit and the name of each."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from accel_core.contract.unit import Unit

    _Entry = tuple[weakref.ref[nn.Parameter], Unit, str]
    """(the parameter, its unit, its name there)."""


class ParameterIndex:
    """Parameter -> (its unit, its name there), by identity.

    Parameters that were replaced are found as well.
    """

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._units: dict[int, Unit] = {}
        """The unit of each entry: clipping asks for that of each parameter in each step."""

    def add(self, unit: Unit, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Remember the parameters that have, or had, these names in the unit."""
        for name, parameter in named:
            key = id(parameter)
            alive, *_ = self._entries.get(key, (None,))
            if alive is None or alive() is not parameter:
                alive = weakref.ref(parameter, self._forget(key))
            self._entries[key] = alive, unit, name
            self._units[key] = unit

    def units_of(self, parameters: Iterable[object]) -> set[Unit | None]:
        """Their units; None among them for what no prepared model has."""
        return set(map(self._units.get, map(id, parameters)))

    def name_of(self, parameter: nn.Parameter) -> str:
        """Return the canonical name of a parameter that has a unit."""
        return self._entries[id(parameter)][2]

    def snapshot(self) -> list[_Entry]:
        """Return the state that `restore` takes."""
        return list(self._entries.values())

    def restore(self, entries: Iterable[_Entry]) -> None:
        """Return to the state of this snapshot."""
        self.clear()
        for alive, unit, name in entries:
            parameter = alive()
            if parameter is not None:
                self.add(unit, [(name, parameter)])

    def clear(self) -> None:
        """Forget all parameters."""
        self._entries.clear()
        self._units.clear()

    def _forget(self, key: int) -> Callable[[object], object]:
        def forget(_: object) -> None:  # another object may get the id of one that is gone
            self._entries.pop(key, None)
            self._units.pop(key, None)

        return forget

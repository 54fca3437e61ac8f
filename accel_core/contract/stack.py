"""The plugins of a run: chosen, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

if TYPE_CHECKING:
    from accel_core.contract.card import Card


@frozen(init=False)
class Chosen:
    """A plugin of the stack, and why it is in it."""

    record: Any
    """Result of discovery."""
    why: str
    name: str
    card: Card
    """The plugin's card; a chosen plugin always has one."""

    def __init__(self, record: Any, why: str) -> None:
        self.__attrs_init__(record, why, record.name, record.card)


@frozen(kw_only=True, eq=False, repr=False)
class Stack:
    """The plugins of a run, chosen but not yet loaded."""

    device: Chosen
    precision: Chosen
    strategies: Mapping[str, Chosen]
    """Alias -> strategy plugin.

    A strategy that is asked for by its own name has this name as its alias.
    """
    default: str
    """Alias of the strategy of units that name none."""
    extensions: tuple[Chosen, ...] = ()
    trackers: tuple[Chosen, ...] = field(default=())
    notes: tuple[str, ...] = ()
    """Notes about sections of a file, and options, that do nothing in this stack."""

    @property
    def strategy(self) -> Chosen:
        """The default strategy."""
        return self.strategies[self.default]

    @property
    def offers(self) -> frozenset[str]:
        """The capability words of the whole default stack, by its cards."""
        return frozenset().union(*[chosen.card.offers for chosen in self._defaults])

    @property
    def _defaults(self) -> Sequence[Chosen]:
        return (self.device, self.strategy, self.precision, *self.extensions)

    def members(self) -> Sequence[Chosen]:
        """Return every chosen plugin, bottom layer first."""
        return (self.device, self.precision, *self.strategies.values(), *self.extensions, *self.trackers)

    def __str__(self) -> str:
        return " + ".join(chosen.name for chosen in self._defaults)

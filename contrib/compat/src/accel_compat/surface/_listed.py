"""Lists of an Accelerator that programs change in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, SupportsIndex

__all__ = ["Listed"]


class Listed(list[Any]):
    """A list whose changes are told: what a program does to it counts."""

    def __init__(self, items: Iterable[Any], tell: Callable[[Iterable[Any]], None]) -> None:
        super().__init__(items)
        self._tell = tell

    def append(self, item: Any) -> None:
        self._tell([*self, item])
        super().append(item)

    def extend(self, items: Iterable[Any]) -> None:
        items = list(items)
        self._tell([*self, *items])
        super().extend(items)

    def remove(self, item: Any) -> None:
        self.pop(next(number for number, each in enumerate(self) if each is item))

    def pop(self, index: SupportsIndex = -1) -> Any:
        left = list(self)
        taken = left.pop(index)
        self[:] = left
        return taken

    def clear(self) -> None:
        self[:] = []

    def __setitem__(self, index: Any, value: Any) -> None:
        after = list(self)
        after[index] = value
        self._tell(after)
        super().__setitem__(index, value)

    def __delitem__(self, index: Any) -> None:
        after = list(self)
        del after[index]
        self[:] = after

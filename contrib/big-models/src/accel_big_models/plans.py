"""A plan: the place of each part of a model, with bytes and reasons."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from attrs import field, frozen

from accel_big_models.sizes import text_of

if TYPE_CHECKING:
    import torch

__all__ = ["HOST", "Place", "Plan"]

HOST: Final = ("cpu", "disk")
"""Places that compute nothing where there is another device."""


@frozen
class Place:
    """The place of one part of a model.

    name: of a module, or of one tensor that a divided module has itself. place: a torch device as text,
    "cpu" or "disk". size: in bytes; what is shared with an earlier part counts there.
    """

    name: str
    place: str
    size: int
    reason: str


@frozen(kw_only=True)
class Plan:
    """The place of each part of a model. Prints as a table.

    places: in the order of the model. memory: place -> bytes that the plan may use, `math.inf` without
    limit. device: where parts on "cpu" and "disk" are computed. kept: bytes of `device` that are left for
    the parts that come and go. dtype: of floating-point weights, None for their own.
    """

    places: tuple[Place, ...]
    memory: Mapping[str, float] = field(factory=dict)
    device: torch.device
    kept: int = 0
    dtype: torch.dtype | None = None

    @property
    def device_map(self) -> dict[str, str]:
        """Name of module or tensor -> place; only "" where there is one place."""
        return (
            {"": self.places[0].place} if len(self.used) == 1 else {it.name: it.place for it in self.places}
        )

    @property
    def used(self) -> dict[str, int]:
        """Place -> bytes of the model there, in the order in which the places are filled."""
        sizes: dict[str, int] = {}
        for part in self.places:
            sizes[part.place] = sizes.get(part.place, 0) + part.size
        return sizes

    def place_of(self, name: str) -> str:
        """Return the place of a module or tensor, or of the part that it belongs to.

        Raises:
            KeyError: no part of the plan has it.
        """
        places = self.device_map
        while name not in places:
            if not name:
                raise KeyError(name)
            name = name.rpartition(".")[0]
        return places[name]

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("part", "place", "size", "why")]
        rows += [(it.name or "(the model)", it.place, text_of(it.size), it.reason) for it in self.places]
        lines = _table(rows)
        for place, size in self.used.items():
            room = self.memory.get(place, math.inf)
            kept = self.kept if place == str(self.device) else 0
            left = "" if room == math.inf else f", {text_of(room - size - kept)} left of {text_of(room)}"
            lines.append(f"{place}: {text_of(size)}{left}" + (f", {text_of(kept)} to stream" if kept else ""))
        return "\n".join(lines)


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = ([text.ljust(width) for text, width in zip(row, widths, strict=True)] for row in rows)
    return ["  ".join(row).rstrip() for row in padded]

"""Strategy `dispatched`: a model larger than its device in an ordinary run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_core import Run

__all__ = ["Dispatched"]


class Dispatched:
    """Places a model by its plan."""

    def __init__(self, config: Any, run: Run) -> None:
        self.run = run

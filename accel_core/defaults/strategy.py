"""The strategy of one process: the model stays the user's object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from accel_core.contract import hooks
from accel_core.contract.hooks import implements

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from accel_core.contract.run import Run
    from accel_core.contract.unit import Unit


class Single:
    """The base layer unchanged. In a world of several processes, for units that do not train."""

    def __init__(self, config: Any, run: Run) -> None:
        self.run = run

    @implements(hooks.refuse_unit)
    def refuse_unit(
        self, unit: Unit, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> Sequence[str]:
        if self.run.world.size == 1 or not optimizers:
            return ()
        reason = (
            f"unit {unit.name!r} has an optimizer, but strategy 'single' would train"
            f" a different copy on each of {self.run.world.size} ranks\n"
            "prepare it with another strategy, or without its optimizer"
        )
        return [reason]

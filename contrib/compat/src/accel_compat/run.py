"""The run of an Accelerator that counts windows, places models and saves weights by Accelerate's rules."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from accel_core import Run, Window

if TYPE_CHECKING:
    from torch import device, nn

__all__ = ["AccelerateRun", "AccelerateWindow"]


class AccelerateWindow(Window):
    """A window whose micro-batches the program may number itself, by `accelerator.step`."""

    __slots__ = ()

    def move_to(self, index: int) -> None:
        """Make the micro-batch `index` the current one; -1 is the boundary before a window's first."""
        self.index, self.boundary = index, index < 0


class AccelerateRun(Run):
    """A run whose settings a program may change at any time, as Accelerate's can be."""

    window_type: ClassVar[type[Window]] = AccelerateWindow

    def set_accumulation_steps(self, steps: int) -> None:
        """Set the micro-batches per window of every unit. A window that is entered now changes too."""
        super().set_accumulation_steps(steps)
        for window in {self.window, *(unit.window for unit in self.units)}:
            window.resize(steps, current=True)

    def use_device(self, device: device) -> None:
        """Put what is prepared from now on onto this device."""
        self.device = device

    def leave_out_weights(self, models: Iterable[nn.Module]) -> None:
        """Leave the weights of exactly these prepared models out of saved states."""
        self.unsaved_models = list(models)

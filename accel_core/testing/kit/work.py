"""What every check's process starts with: the simulated device if there is one, an Accelerator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from attrs import frozen

from accel_core import InitProcessGroupKwargs

if TYPE_CHECKING:
    from accel_core import Accelerator

__all__ = ["OFFERS", "Way", "cut", "enter", "make", "stack_members"]

COLLECTIVE_SECONDS = 20
OFFERS = "ACCEL_KIT_OFFERS"
"""What the stack's cards claim, for processes that train in another way too."""


@frozen
class Way:
    """A way to train: a label, what it changes of the stack's arguments, and a number of processes."""

    label: str
    changes: Mapping[str, Any]
    world: int

    def __str__(self) -> str:
        return f"{self.label}@{self.world}"

    def arguments(self, stack: Mapping[str, Any]) -> dict[str, Any]:
        """For `Accelerator`; a change to None leaves the argument out."""
        return {name: value for name, value in {**stack, **self.changes}.items() if value is not None}


def enter(
    simulate: tuple[str, str, str | None] | None, function: Callable[..., Any], args: Sequence[Any]
) -> Any:
    """Call `function(*args)`; with `simulate`, the arguments of `pretend`, on a simulated device."""
    if simulate is not None:
        from accel_core.testing.simulated.pretence import pretend

        pretend(*simulate)
    return function(*args)


def make(arguments: Mapping[str, Any], **more: Any) -> Accelerator:
    """An Accelerator of the stack under test, whose collectives give up in seconds."""
    from accel_core import Accelerator

    limit = InitProcessGroupKwargs(timeout=timedelta(seconds=COLLECTIVE_SECONDS))
    handlers = [limit, *more.pop("kwargs_handlers", ())]
    return Accelerator(**{**arguments, **more}, kwargs_handlers=handlers)


def stack_members(arguments: Mapping[str, Any]) -> list[str]:
    """Names of the plugins of a run; making it loads them and checks each of their hooks."""
    accelerator = make(arguments)
    names = [chosen.name for chosen in accelerator.run.stack.members()]
    accelerator.end_training()
    return names


def cut() -> None:
    """Before each batch of a loop by hand: what its author must do where a device records its work."""
    from accel_core.run import live

    for run in live():
        if run.mark_step is not None:
            run.mark_step("batch")

"""What every check's process starts with: the simulated device if there is one, an Accelerator."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from attrs import frozen

from accel_core import InitProcessGroupKwargs
from accel_core.plugins import discover

if TYPE_CHECKING:
    from accel_core import Accelerator

__all__ = ["Way", "enter", "make", "stack_members"]

COLLECTIVE_SECONDS = 20


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


def enter(simulate: tuple[str, str] | None, function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Call `function(*args)`; with `simulate`, on a machine that has one device of that plugin.

    `simulate` is (name of the device plugin, name of the communication backend).
    """
    if simulate is not None:
        _pretend(*simulate)
    return function(*args)


def _pretend(plugin: str, communication: str) -> None:
    from accel_core.testing.simulated.device import simulate

    record = discover().get(plugin)
    assert record is not None
    assert record.card is not None
    simulate(record.card.torch_device or plugin, communication)
    # Torch lets Python have a single device: each rank is a machine of its own.
    if "RANK" in os.environ:
        alone = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        nodes = {"GROUP_RANK": os.environ["RANK"], "GROUP_WORLD_SIZE": os.environ["WORLD_SIZE"]}
        os.environ.update(alone | nodes)
    # It would look for the hardware, which nobody can pretend to have.
    object.__setattr__(record.card, "probe", None)
    object.__setattr__(record.card, "verify", None)


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

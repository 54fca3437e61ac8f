"""What every check's process starts with: the simulated device if there is one, an Accelerator, its loop."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from attrs import frozen

from accel_core import InitProcessGroupKwargs

if TYPE_CHECKING:
    from torch import Tensor, nn

    from accel_core import Accelerator, StepOutput

__all__ = [
    "OFFERS",
    "ForwardLoss",
    "Way",
    "cut",
    "enter",
    "known_loss",
    "learn",
    "make",
    "owns_schedule",
    "sharing",
    "stack_members",
]

ForwardLoss = Callable[["nn.Module", Any], "tuple[Tensor, Any]"]


COLLECTIVE_SECONDS = 20
OFFERS = "ACCEL_KIT_OFFERS"
"""What the stack's cards claim, for processes that train in another way too."""


@frozen
class Way:
    """A way to train: a label, what it changes of the stack's arguments, and a number of processes."""

    label: str
    changes: Mapping[str, Any]
    world: int
    variables: Mapping[str, str] | None = None
    """Those of its options; None, of the stack under test: as they are."""

    @property
    def own(self) -> bool:
        """Whether it is the stack under test."""
        return self.variables is None

    def __str__(self) -> str:
        name, colon, options = self.label.partition(":")
        return f"{name}@{self.world}{colon}{options}"

    def arguments(self, stack: Mapping[str, Any]) -> dict[str, Any]:
        """For `Accelerator`; a change to None leaves the argument out."""
        return {name: value for name, value in {**stack, **self.changes}.items() if value is not None}

    def entered(self) -> AbstractContextManager[Any]:
        """With its options in the environment."""
        if self.variables is None:
            return nullcontext()
        others = {name: text for name, text in os.environ.items() if not name.startswith("ACCEL__")}
        return patch.dict(os.environ, {**others, **self.variables}, clear=True)


def enter(
    simulate: tuple[str, str, str | None] | None, function: Callable[..., Any], args: Sequence[Any]
) -> Any:
    """Call `function(*args)`; with `simulate`, the arguments of `pretend`, on a simulated device."""
    if simulate is not None:
        from accel_testing.simulated.pretence import pretend

        pretend(*simulate)
    return function(*args)


def make(arguments: Mapping[str, Any], **more: Any) -> Accelerator:
    """An Accelerator of the stack under test, whose collectives give up in seconds."""
    from accel_core import Accelerator

    limit = InitProcessGroupKwargs(timeout=timedelta(seconds=COLLECTIVE_SECONDS))
    handlers = [limit, *more.pop("kwargs_handlers", ())]
    return Accelerator(**{**arguments, **more}, kwargs_handlers=handlers)


def sharing(arguments: Mapping[str, Any]) -> tuple[int, bool]:
    """How many shares the data has, of which processes may read the same; whether the schedule is owned."""
    accelerator = make(arguments)
    found = accelerator.run.topology.readers, owns_schedule(accelerator)
    accelerator.end_training()
    return found


def owns_schedule(accelerator: Accelerator) -> bool:
    """Whether forward and backward are the strategy's, and a loop has only `forward_backward`."""
    return "schedule" in accelerator.run.hooks.owns(accelerator.run.config)


def learn(
    accelerator: Accelerator,
    model: nn.Module,
    batches: Iterable[Any],
    forward_loss: ForwardLoss,
    size: int = 1,
) -> Iterator[float]:
    """Forward and backward of each batch, and its loss while its `accumulate` is entered.

    Where the strategy owns the schedule: of each window of `size` batches, and the mean of its losses.
    """
    if not owns_schedule(accelerator):
        for batch in batches:
            with accelerator.accumulate(model):
                loss, _ = forward_loss(model, batch)
                accelerator.backward(loss)
                yield loss.item()
        return
    from accel_testing.kit.network import parts

    stream = iter(batches)
    while window := parts(list(islice(stream, size))):
        output = accelerator.forward_backward(model, window, forward_loss, microbatches=len(window))
        yield known_loss(accelerator, output)


def known_loss(accelerator: Accelerator, output: StepOutput) -> float:
    """The window's loss, from a process that has it of the same data. Collective."""
    mine = accelerator.run.topology.reader, output.loss.item() if output.valid else None
    everyone = accelerator.run.collectives("control").all_gather_object(mine)
    known: list[float] = [each for at, each in everyone if at == mine[0] and each is not None]
    return known[0]


def stack_members(arguments: Mapping[str, Any]) -> list[str]:
    """Names of the plugins of a run; making it loads them and checks each of their hooks."""
    accelerator = make(arguments)
    names = [chosen.name for chosen in accelerator.run.stack.members()]
    accelerator.end_training()
    return names


def cut() -> None:
    """Before each batch of a loop by hand: what its author must do where a device records its work."""
    from accel_core.contract.run import live

    for run in live():
        if run.mark_step is not None:
            run.mark_step("batch")

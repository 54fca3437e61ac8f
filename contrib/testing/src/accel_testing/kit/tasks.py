"""The start of each process of a check: simulated device, Accelerator, loop."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any
from unittest.mock import patch
from weakref import WeakSet

from attrs import frozen

from accel_core import InitProcessGroupKwargs
from accel_testing.kit.deadline import collective_seconds

if TYPE_CHECKING:
    from torch import Tensor, nn

    from accel_core import Accelerator, Run, StepOutput

__all__ = [
    "OFFERS",
    "ForwardLoss",
    "Scenario",
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


_runs: WeakSet[Run] = WeakSet()
OFFERS = "ACCEL_KIT_OFFERS"
"""The variable that lists what the stack's cards offer."""


@frozen
class Scenario:
    """A way to train: label, changes to the stack's arguments, number of processes."""

    label: str
    changes: Mapping[str, Any]
    world: int
    variables: Mapping[str, str] | None = None
    """The variables of its options; None for the stack under test."""

    @property
    def own(self) -> bool:
        """True for the stack under test."""
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
    """Call `function(*args)`, on a simulated device if `simulate` describes one."""
    if simulate is not None:
        from accel_testing.simulated.simulate import simulate_plugin

        simulate_plugin(*simulate)
    return function(*args)


def make(arguments: Mapping[str, Any], **more: Any) -> Accelerator:
    """Return an Accelerator under test whose collectives give up well before the world's deadline.

    more: other arguments. Where one replaces a plugin of the stack, its options are left out of the
    environment: core refuses those of a plugin that is not in the run.
    """
    from accel_core import Accelerator

    limit = InitProcessGroupKwargs(timeout=timedelta(seconds=collective_seconds()))
    handlers = [limit, *more.pop("kwargs_handlers", ())]
    replaced = {name for name in arguments.keys() & more.keys() if arguments[name] != more[name]}
    plugins = {arguments[name] for name in replaced if isinstance(arguments[name], str)}
    with _without_options_of(plugins | {"parallelism"} if "strategy" in replaced else plugins):
        accelerator = Accelerator(**{**arguments, **more}, kwargs_handlers=handlers)
    _runs.add(accelerator.run)
    return accelerator


def _without_options_of(sections: Collection[str]) -> AbstractContextManager[Any]:
    prefixes = tuple(f"ACCEL__{name.replace('-', '_').upper()}__" for name in sections)
    others = {name: text for name, text in os.environ.items() if not name.startswith(prefixes)}
    return patch.dict(os.environ, others, clear=True) if len(others) < len(os.environ) else nullcontext()


def sharing(arguments: Mapping[str, Any]) -> tuple[int, bool]:
    """Count the readers, and tell if the strategy owns the schedule."""
    accelerator = make(arguments)
    found = accelerator.run.topology.readers, owns_schedule(accelerator)
    accelerator.end_training()
    return found


def owns_schedule(accelerator: Accelerator) -> bool:
    """Tell if a loop has only `forward_backward`: the strategy owns the schedule."""
    return accelerator.run.hooks.implementations("forward_backward")[-1].plugin != "base"


def learn(
    accelerator: Accelerator,
    model: nn.Module,
    batches: Iterable[Any],
    forward_loss: ForwardLoss,
    size: int = 1,
) -> Iterator[float]:
    """Train on each batch, and yield its loss while its `accumulate` is entered.

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
    """Return the window's loss from a process that has it. Collective."""
    mine = accelerator.run.topology.reader, output.loss.item() if output.valid else None
    everyone = accelerator.run.collectives("control").all_gather_object(mine)
    known: list[float] = [each for at, each in everyone if at == mine[0] and each is not None]
    return known[0]


def stack_members(arguments: Mapping[str, Any]) -> list[str]:
    """Make a run, which loads plugins and checks their hooks, and list its plugins."""
    accelerator = make(arguments)
    names = [chosen.name for chosen in accelerator.run.stack.members()]
    accelerator.end_training()
    return names


def cut() -> None:
    """Mark the start of a batch of a plain loop, for devices that record work."""
    for run in _runs:
        if not run.ended and run.mark_step is not None:
            run.mark_step("batch")

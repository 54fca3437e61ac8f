"""The extension `ema`: it follows steps, and lends the average to evaluations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import nn

from accel_core import AccelError, CheckpointError, Entry, before_step, get_logger, hooks, implements
from accel_ema.average import Average
from accel_ema.interrupts import uninterrupted

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from accel_core import Run, RunConfig, Unit
    from accel_ema.config import EMAConfig

__all__ = ["MovingAverages", "averaged"]

_logger = get_logger(__name__)
_live: WeakSet[MovingAverages] = WeakSet()
_nothing = nullcontext()


@contextmanager
def averaged(*models: nn.Module) -> Iterator[None]:
    """Put the moving average in the place of these models' weights.

    Collective, at both ends. For evaluation, and for `save_model` of the average.

    Models of one unit have theirs together. Before the first update the average is the weights themselves.
    Buffers stay those of the training. Weights have their own values back afterwards, also after an
    exception or Ctrl-C.

    Args:
        models: as given to `prepare`, or returned by it.

    Raises:
        AccelError: no model is given, one belongs to no run with this extension or to several, has no
            optimizer, or its average is in place already. Inside: a forward with gradients, or an optimizer's
            step. A parameter was replaced by another one inside.
        CheckpointError: inside: the state is saved or loaded.
    """
    if not models:
        raise AccelError("averaged() without a model puts no average in place\nname it: averaged(model)")
    averages = dict.fromkeys(_average_of(model) for model in models)
    with ExitStack() as stack:
        for average in averages:
            stack.enter_context(_in_place(average))
        yield


def _average_of(model: nn.Module) -> Average:
    found = [(plugin, plugin.run.prepared.unit_of_model(model)) for plugin in _live]
    units = [(plugin, unit) for plugin, unit in found if unit is not None]
    trained = [(plugin, unit) for plugin, unit in units if unit.optimizers]
    if len(trained) == 1:
        ((plugin, unit),) = trained
        return plugin.average_of(unit)
    if trained:
        problem = f"is trained by {len(trained)} Accelerators, each with an average of its own"
        remedy = "call free_memory() of those that have ended"
    elif units:
        problem, remedy = "has no optimizer, so nothing is averaged", "prepare it together with its optimizer"
    else:
        problem = "was not prepared by an Accelerator with the extension ema"
        remedy = (
            "make it with Accelerator(plugins=[EMAConfig()]), or extensions: [ema], and prepare the model"
        )
    raise AccelError(f"averaged: this {type(model).__name__} {problem}\n{remedy}")


@contextmanager
def _in_place(average: Average) -> Iterator[None]:
    if average.is_swapped:
        raise AccelError(
            f"averaged: the weights of unit {average.unit.name!r} are its average already\n"
            "leave out the inner `with averaged(...)`"
        )
    interrupt, replaced = None, list[str]()
    try:
        with uninterrupted():
            average.put_in()
        yield
    finally:
        while True:
            try:
                if not average.is_swapped:
                    break
                with uninterrupted():
                    replaced = average.take_out()
            except KeyboardInterrupt as error:  # it came before the context, or was put off until its end
                interrupt = error
        if interrupt is not None:
            raise interrupt
    if replaced:
        raise AccelError(
            f"averaged: {replaced[0]} of unit {average.unit.name!r} is another parameter than before,"
            " which is not trained and stays as it is\n"
            "inside `with averaged(...)` write into parameters, or put those of before back"
        )


class MovingAverages:
    """An average for each unit with an optimizer."""

    def __init__(self, config: EMAConfig, run: Run) -> None:
        self.config, self.run = config, run
        self._averages: dict[Unit, Average] = {}
        self._undo: dict[Unit, list[Callable[[], None]]] = {}
        _live.add(self)

    def average_of(self, unit: Unit) -> Average:
        """Return the unit's average, which begins with its first update."""
        return self._averages.setdefault(unit, Average(unit, self.config))

    @implements(hooks.refuse)
    def refuse(self, config: RunConfig) -> Sequence[str]:
        given = {name: getattr(self.config, name) for name in ("decay", "min_decay")}
        reasons = [
            f"ema.{name} is {value:g}: an average keeps at most all of itself\nset it to 1 or less"
            for name, value in given.items()
            if value > 1
        ]
        if given["decay"] < given["min_decay"] <= 1:
            reasons.append(
                f"ema.min_decay is {given['min_decay']:g}, above ema.decay, {given['decay']:g}, which it"
                " would replace\nset it to decay or less"
            )
        if not self.config.inv_gamma:
            reasons.append("ema.inv_gamma is 0, and the number of updates is divided by it\nset it above 0")
        return reasons

    # -- training --------------------------------------------------------------------------------

    @implements(hooks.transform_model)
    def transform_model(self, unit: Unit, model: nn.Module, phase: str) -> nn.Module:
        self.average_of(unit).forget_weights()
        return model

    @implements(hooks.wrap_optimizer)
    def wrap_optimizer(self, unit: Unit, optimizer: Optimizer) -> Optimizer:
        average = self.average_of(unit)

        def refuse_inside(*step: Any) -> None:
            if average.is_swapped:
                raise AccelError(
                    f"optimizer.step() inside averaged(...): the weights of unit {unit.name!r} are their"
                    " average, which is not trained\nleave `with averaged(...)` before the step"
                )

        self._undo.setdefault(unit, []).append(before_step(optimizer, refuse_inside))
        return optimizer

    @implements(hooks.autocast)
    def autocast(self, unit: Unit) -> Callable[[], AbstractContextManager[Any]] | None:
        """Not to cast: a forward that is to be trained is seen here."""
        average = self.average_of(unit)

        def around_forward() -> AbstractContextManager[Any]:
            if average.is_swapped and torch.is_grad_enabled():
                raise AccelError(
                    f"a forward with gradients inside averaged(...): the weights of unit {unit.name!r} are"
                    " their average, which is not trained\n"
                    "evaluate it under torch.no_grad(), or leave `with averaged(...)` before training"
                )
            return _nothing

        return around_forward

    @implements(hooks.after_step)
    def after_step(self, unit: Unit, optimizer: Optimizer, applied: bool) -> None:
        if applied:
            number = next((n for n, each in enumerate(unit.optimizers) if each is optimizer), 0)
            self.average_of(unit).note_step(number)

    @implements(hooks.average_parameters)
    def average_parameters(self, unit: Unit) -> None:
        self.average_of(unit).share()

    # -- checkpoints -----------------------------------------------------------------------------

    @implements(hooks.save_state)
    def save_state(self, unit: Unit) -> Mapping[str, Entry]:
        if not unit.optimizers:
            return {}
        average = self.average_of(unit)
        if average.is_swapped:
            raise CheckpointError(
                f"the state of unit {unit.name!r} inside averaged(...): its weights are their average\n"
                "leave `with averaged(...)` before save_state and load_state"
            )
        leaves = {f"weights/{name}": Entry(value=leaf) for name, leaf in average.leaves().items()}
        return {**leaves, "steps": Entry(value=[*average.steps]), "averaged": Entry(value=average.names)}

    @implements(hooks.load_state)
    def load_state(self, unit: Unit, entries: Mapping[str, Entry]) -> None:
        average = self.average_of(unit)
        if not average.is_swapped:  # it was not `averaged` that wrote into the weights
            average.begin_anew()
        if "steps" in entries:
            steps: Any = entries["steps"].value
            optimizers = len(unit.optimizers)
            same = len(steps) == optimizers
            average.steps = [*steps] if same else [max(steps, default=0)] * optimizers
            # A load that is not strict may leave averages as they were, of other weights than these.
            loaded = {name.removeprefix("weights/") for name in entries}
            saved: Any = entries["averaged"].value if "averaged" in entries else loaded
            average.keep_only(loaded.intersection(saved))
            frozen = [name for name in saved if name not in loaded]
            if frozen := [name for name in frozen if name in unit.named_parameters()]:
                _logger.warning(
                    "ema: the average of %s is left out: frozen here, it is averaged anew once it trains;"
                    " to take the average, unfreeze it before load_state",
                    ", ".join(frozen),
                )

    # -- what it is ------------------------------------------------------------------------------

    @implements(hooks.describe)
    def describe(self, unit: Unit) -> Sequence[str]:
        if not unit.optimizers:
            return []
        config = self.config
        after = f" after {config.update_after}" if config.update_after else ""
        schedule = f"every {config.update_every} applied step(s){after}, decay {config.decay:g}"
        return [f"ema averages its trainable weights, {schedule} (warmup: {config.warmup}), and no buffers"]

    @implements(hooks.release)
    def release(self, unit: Unit) -> None:
        self._averages.pop(unit, None)
        for undo in self._undo.pop(unit, []):
            undo()

"""Training, twice: as an ordinary PyTorch loop, and the same with an Accelerator.

Both take a `Recipe` and give a `Trace` of what happened; level 2 compares the traces.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from itertools import islice
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from accel_core import Accelerator, AccelError, GradScalerKwargs
from accel_testing.kit.network import given, network, parts
from accel_testing.kit.stack import REFERENCE
from accel_testing.kit.tasks import cut, known_loss, learn, make, owns_schedule

__all__ = [
    "Recipe",
    "Trace",
    "described",
    "forward_dtypes",
    "mid_window",
    "ours",
    "own_loop",
    "plain",
    "recomputed",
    "unwrapped_strangers",
    "whole_windows",
]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@frozen(kw_only=True)
class Recipe:
    """One way to train. Ten batches, so that windows of 4 end with a shorter one."""

    precision: str | None = None
    """mixed_precision; None: the stack's own."""
    accumulation: int = 1
    batches: int = 10
    batch_size: int = 4
    epochs: int = 2
    clip_norm: float | None = None
    clip_value: float | None = None
    schedule: bool = False
    optimizers: int = 1
    init_scale: float = 65536.0
    calls: str = "one"
    """Calls of prepare: one, late (one per object), late_optimizer (made after)."""


@frozen
class Trace:
    """A training run as plain numbers, step by step."""

    losses: list[float] = field(factory=list)
    norms: list[float] = field(factory=list)
    rates: list[float] = field(factory=list)
    skipped: list[bool] = field(factory=list)
    weights: list[float] = field(factory=list)


def loader(recipe: Recipe) -> DataLoader[Any]:
    """Return the recipe's batches, unshuffled."""
    return DataLoader(given.dataset(recipe.batches * recipe.batch_size), batch_size=recipe.batch_size)


def optimizers(recipe: Recipe, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Make the network's optimizer, or SGD and AdamW for a half of it each."""
    parameters = list(model.parameters())
    if recipe.optimizers == 1:
        return [given.optimizer(parameters, 0.1)]
    half = len(parameters) // 2
    return [torch.optim.SGD(parameters[:half], lr=0.05), torch.optim.AdamW(parameters[half:], lr=0.02)]


def schedulers(recipe: Recipe, made: Iterable[torch.optim.Optimizer]) -> list[Any]:
    """Return a rate that falls with each step."""
    if not recipe.schedule:
        return []
    return [torch.optim.lr_scheduler.LambdaLR(each, lambda step: 1 / (1 + step)) for each in made]


def weights(model: nn.Module, accelerator: Accelerator | None = None) -> list[float]:
    """All parameters as numbers, by name; `accelerator` gathers sharded ones."""
    cut()  # the last step, too, is done before its results are read one by one
    found = model.state_dict() if accelerator is None else accelerator.get_state_dict(model, rank0_only=False)
    return [
        value
        for _, parameter in sorted(found.items())
        for value in parameter.detach().float().cpu().flatten().tolist()
    ]


class _Reference:
    """The precision of a plain loop: torch's autocast, or a named module."""

    def _of(self, precision: str) -> Any:
        named = REFERENCE in os.environ and precision not in ("no", *DTYPES)
        return import_module(os.environ[REFERENCE]) if named else None

    def convert(self, model: nn.Module, precision: str) -> nn.Module:
        module = self._of(precision)
        converted: nn.Module = model if module is None else module.convert(model)
        return converted

    def context(self, precision: str, device: torch.device) -> AbstractContextManager[Any]:
        module = self._of(precision)
        if module is None:
            dtype = DTYPES.get(precision, torch.bfloat16)
            return torch.autocast(device.type, dtype=dtype, enabled=precision in DTYPES)
        found: AbstractContextManager[Any] = module.context(device)
        return found


reference = _Reference()


# -- the plain loop --------------------------------------------------------------------------------


def plain(recipe: Recipe, device: torch.device, precision: str, *, whole: bool = False) -> Trace:
    """Return the recipe without accel-core: what a careful author writes by hand.

    `whole`: a window's loss is the mean of its own, few as they may be, and one number in the trace; its
    batches are cut as for a strategy that owns the schedule.
    """
    trace = Trace()
    model = reference.convert(given.network().to(device), precision)
    made = optimizers(recipe, model)
    rates = schedulers(recipe, made)
    scaler = torch.amp.GradScaler(device.type, init_scale=recipe.init_scale, enabled=precision == "fp16")
    applied: list[torch.optim.Optimizer] = []
    for each in made:
        each.register_step_post_hook(lambda optimizer, *_: applied.append(optimizer))
    for batches in _windows(recipe):
        losses, window = [], parts(batches) if whole else batches
        for batch in window:
            cut()
            with reference.context(precision, device):
                loss, _ = given.forward_loss(model, [each.to(device) for each in batch])
            scaler.scale(loss / (len(window) if whole else recipe.accumulation)).backward()
            losses.append(loss.item())
        trace.losses.extend([sum(losses) / len(losses)] if whole else losses)
        applied.clear()
        _clip_plain(recipe, trace, model, made, scaler)
        for each in made:
            scaler.step(each)
            trace.skipped.append(each not in applied)
        scaler.update()
        for each, rate in zip(made, rates, strict=False):  # no rates, unless scheduled
            if each in applied:
                rate.step()
        for each in made:
            each.zero_grad()
            trace.rates.append(each.param_groups[0]["lr"])
    trace.weights.extend(weights(model))
    return trace


def _windows(recipe: Recipe) -> Iterator[list[Sequence[Tensor]]]:
    for _ in range(recipe.epochs):
        batches = iter(loader(recipe))
        while window := list(islice(batches, recipe.accumulation)):
            yield window


def _clip_plain(
    recipe: Recipe,
    trace: Trace,
    model: nn.Module,
    made: Sequence[torch.optim.Optimizer],
    scaler: torch.amp.GradScaler,
) -> None:
    if recipe.clip_norm is None and recipe.clip_value is None:
        return
    for each in made:
        scaler.unscale_(each)
    if recipe.clip_norm is not None:
        trace.norms.append(nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm).item())
    if recipe.clip_value is not None:
        nn.utils.clip_grad_value_(model.parameters(), recipe.clip_value)


# -- the same with an Accelerator ------------------------------------------------------------------


def ours(recipe: Recipe, arguments: Mapping[str, Any]) -> tuple[Trace, Trace]:
    """(with an Accelerator, plain on the same device), of one recipe."""
    accelerator = recipe_accelerator(recipe, arguments)
    trace = train(recipe, accelerator)
    whole = owns_schedule(accelerator)
    reference = plain(recipe, accelerator.device, accelerator.mixed_precision, whole=whole)
    accelerator.end_training()
    return trace, reference


def recipe_accelerator(recipe: Recipe, arguments: Mapping[str, Any], **more: Any) -> Accelerator:
    """Return the stack under test, set as the recipe says."""
    if recipe.precision is not None:
        more["mixed_precision"] = recipe.precision
    scale = GradScalerKwargs(init_scale=recipe.init_scale)
    return make(arguments, gradient_accumulation_steps=recipe.accumulation, kwargs_handlers=[scale], **more)


def train(recipe: Recipe, accelerator: Accelerator) -> Trace:
    """Return the loop of a user."""
    trace = Trace()
    model, made, rates, batches = prepared(recipe, accelerator)
    for _ in range(recipe.epochs):
        for loss in learn(accelerator, model, batches, given.forward_loss, recipe.accumulation):
            trace.losses.append(loss)
            _clip_ours(recipe, trace, model, accelerator)
            for each in made:
                each.step()
            for each in rates:
                each.step()
            for each in made:
                each.zero_grad()
            if accelerator.sync_gradients:
                trace.skipped.extend(each.step_was_skipped for each in made)
                trace.rates.extend(each.param_groups[0]["lr"] for each in made)
    trace.weights.extend(weights(model, accelerator))
    return trace


def prepared(recipe: Recipe, accelerator: Accelerator) -> tuple[nn.Module, list[Any], list[Any], Any]:
    """Prepare model, optimizers, schedulers and loader in the recipe's order."""
    model: nn.Module = given.network()
    if recipe.calls == "late_optimizer":
        model = accelerator.prepare(model)
        made = optimizers(recipe, model)
    else:
        made = optimizers(recipe, model)
    rates = schedulers(recipe, made)
    if recipe.calls == "one":
        objects = accelerator.prepare(loader(recipe), *rates, model, *made)
        batches, rates = objects[0], list(objects[1 : 1 + len(rates)])
        return objects[1 + len(rates)], list(objects[2 + len(rates) :]), rates, batches
    if recipe.calls == "late":
        model = accelerator.prepare(model)
    batches = accelerator.prepare(loader(recipe))
    made = [accelerator.prepare(each) for each in made]
    return model, made, [accelerator.prepare(each) for each in rates], batches


def _clip_ours(recipe: Recipe, trace: Trace, model: nn.Module, accelerator: Accelerator) -> None:
    if recipe.clip_norm is not None:
        norm = accelerator.clip_grad_norm_(model.parameters(), recipe.clip_norm)
        if accelerator.sync_gradients:
            trace.norms.append(norm.item())  # type: ignore[union-attr]
    if recipe.clip_value is not None:
        accelerator.clip_grad_value_(model.parameters(), recipe.clip_value)


def forward_dtypes(precision: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layers' dtypes, and True if autocast outlives a forward."""
    accelerator = make(arguments, mixed_precision=precision)
    model = accelerator.prepare(given.network())
    batch = next(iter(accelerator.prepare(loader(Recipe()))))
    seen: set[str] = set()
    inner: Any = accelerator.unwrap_model(model)
    for layer in (inner[0], inner[3]):
        layer.register_forward_hook(lambda module, args, output: seen.add(str(output.dtype)))
    if owns_schedule(accelerator):
        accelerator.forward_backward(model, [batch], given.forward_loss, microbatches=1, forward_only=True)
    else:
        model(batch[0])
        inner(batch[0])
    found = {
        "computed in": seen,
        "parameters": str(accelerator.get_state_dict(model, rank0_only=False)["0.weight"].dtype),
        "left": torch.is_autocast_enabled(accelerator.device.type),
    }
    accelerator.end_training()
    return found


def described(arguments: Mapping[str, Any]) -> list[Any]:
    """Return what the plugins say of a prepared model and its optimizer."""
    accelerator = make(arguments)
    prepared(Recipe(), accelerator)
    lines = [line for unit in accelerator.run.units for line in unit.hooks.describe(unit)]
    accelerator.end_training()
    return lines


class _Around(nn.Module):
    """A module of the user's that looks like a wrapper."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)


def unwrapped_strangers(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Unwrap modules that were not prepared, beside a model that was.

    Returns the name of each result that is another module.
    """
    accelerator = make(arguments)
    prepared(Recipe(), accelerator)
    found = {}
    for stranger in (nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)), _Around()):
        try:
            inner = accelerator.unwrap_model(stranger)
        except AttributeError as error:
            found[type(stranger).__name__] = str(error)
        else:
            found[type(stranger).__name__] = "" if inner is stranger else type(inner).__name__
    accelerator.end_training()
    return found


def own_loop(
    accumulation: int, by_hand: bool, arguments: Mapping[str, Any]
) -> tuple[str, list[float], list[float]]:
    """Train with an own forward and backward: the error, or both weights.

    Plain SGD, whose steps are as long as the gradient. Also where the strategy owns the schedule: it may
    refuse such a loop, or train by it. by_hand: backward is the loss's own, divided by its author.
    """
    recipe = Recipe(accumulation=accumulation, batches=6, epochs=1)
    accelerator = recipe_accelerator(recipe, arguments, mixed_precision="no")
    model = network()
    model, optimizer, batches = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loader(recipe)
    )
    try:
        for x, y in batches:
            cut()
            with accelerator.accumulate(model):
                loss = cross_entropy(model(x).float(), y)
                (loss / accumulation).backward() if by_hand else accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    except AccelError as error:
        accelerator.end_training()
        return str(error), [], []
    ours = weights(model, accelerator)
    device = accelerator.device
    accelerator.end_training()
    return "", ours, _own_loop_by_hand(recipe, device)


def _own_loop_by_hand(recipe: Recipe, device: torch.device) -> list[float]:
    model = network().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for window in _windows(recipe):
        for x, y in window:
            cut()
            (cross_entropy(model(x.to(device)), y.to(device)) / recipe.accumulation).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def whole_windows(recipe: Recipe, arguments: Mapping[str, Any]) -> tuple[Trace, Trace]:
    """Compare `forward_backward` with the plain loop, window by window."""
    accelerator = recipe_accelerator(recipe, arguments)
    trace = Trace()
    model, (optimizer,), _, batches = prepared(recipe, accelerator)
    size = recipe.accumulation * given.MICROBATCHES if given.named else None
    for _ in range(recipe.epochs):
        stream = (part for batch in batches for part in parts([batch]))
        for _ in range(recipe.batches // recipe.accumulation):
            output = accelerator.forward_backward(model, stream, given.forward_loss, microbatches=size)
            optimizer.step()
            optimizer.zero_grad()
            trace.losses.append(known_loss(accelerator, output))
        assert next(stream, None) is None
    trace.weights.extend(weights(model, accelerator))
    plainly = plain(recipe, accelerator.device, accelerator.mixed_precision, whole=True)
    accelerator.end_training()
    return trace, Trace(losses=plainly.losses, weights=plainly.weights)


def recomputed(recompute: bool, arguments: Mapping[str, Any]) -> tuple[Trace, int]:
    """Train a model that uses hook `checkpoint_function`, and count forwards."""
    accelerator = make(arguments)
    model = _Recomputed(given.network())
    optimizer = given.optimizer(model.parameters(), lr=0.1)
    prepared, optimizer, batches = accelerator.prepare(model, optimizer, loader(Recipe()))
    (unit,) = accelerator.run.units
    model.function = unit.hooks.checkpoint_function(unit) if recompute else None
    trace = Trace()
    for batch in batches:
        loss, _ = given.forward_loss(prepared, batch)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        trace.losses.append(loss.item())
    trace.weights.extend(weights(prepared, accelerator))
    accelerator.end_training()
    return trace, model.forwards


class _Recomputed(nn.Module):
    """Has its body computed by a function."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.forwards = body, 0
        self.function: Callable[..., Any] | None = None

    def forward(self, *inputs: Any) -> Any:
        return self.function(self._count, *inputs) if self.function else self._count(*inputs)

    def _count(self, *inputs: Any) -> Any:
        self.forwards += 1
        return self.body(*inputs)


def mid_window(arguments: Mapping[str, Any]) -> dict[str, bool]:
    """Call clip, step, scheduler and zero_grad in the first of two micro-batches."""
    recipe = Recipe(accumulation=2, schedule=True)
    accelerator = recipe_accelerator(recipe, arguments)
    model, (optimizer,), (scheduler,), batches = prepared(recipe, accelerator)
    x, y = next(iter(batches))
    before, rate = weights(model, accelerator), scheduler.get_last_lr()
    with accelerator.accumulate(model):
        accelerator.backward(cross_entropy(model(x).float(), y))
        gradients = [p.grad.cpu().clone() for p in model.parameters() if p.grad is not None]
        accelerator.clip_grad_norm_(model.parameters(), 1e-6)
        clipped = [p.grad.cpu() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        kept = [p.grad.cpu() for p in model.parameters() if p.grad is not None]
    found = {
        "weights changed": weights(model, accelerator) != before,
        "clipped": not _equal(gradients, clipped),
        "gradients kept": _equal(gradients, kept),
        "rate changed": scheduler.get_last_lr() != rate,
    }
    accelerator.end_training()
    return found


def _equal(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))

"""Random training programs, run by an Accelerator and by plain PyTorch.

Plain PyTorch has the batches of all ranks.
A program has windows of some micro-batches with one or several losses, means or sums over items, limits of
gradients, schedules, evaluations, windows that are dropped, saves and loads.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from accel_core import Accelerator

__all__ = ["SCALE", "Program", "WindowPlan", "make_program", "require_equal", "train", "train_plainly"]

ROWS = 4
"""Of a rank's batch."""
SCALE = 64.0
"""Constant loss scale of float16, at which nothing overflows."""
NORM, VALUE = 0.1, 0.01
"""Limits of gradients, which they exceed."""
OPTIMIZERS: Mapping[str, Callable[..., Optimizer]] = {
    "SGD": partial(SGD, lr=0.1),
    "momentum": partial(SGD, lr=0.1, momentum=0.9),
    "AdamW": partial(AdamW, lr=0.01),
}
MICRO_BATCHES = ("one loss",) * 4 + ("two losses", "two forwards", "evaluation", "no backward", "other loss")


@frozen
class WindowPlan:
    """One window: what comes before it, its micro-batches, and how it ends.

    form: "accumulate"; "windows" of the micro-batches, which are divided by their number; or "items", whose
        losses are sums over other numbers of items in each micro-batch and rank, maybe none.
    """

    form: str
    before: tuple[str, ...]
    micro_batches: tuple[str, ...]
    limit: str | None
    halves_gradients: bool
    is_dropped: bool


@frozen
class Program:
    """A training program.

    dtype: of the weights. optimizer: its kind. clears: where `zero_grad` stands. splits: two optimizers
        share the model.
    """

    seed: int
    dtype: torch.dtype
    optimizer: str
    clears: str
    schedules: bool
    splits: bool
    size: int
    windows: tuple[WindowPlan, ...]


def make_program(
    seed: int, *, dtype: torch.dtype = torch.float64, splits: bool = True, edits: bool = True
) -> Program:
    """Return the program of this seed.

    Args:
        seed: any number.
        dtype: of the weights; float32 for mixed precision.
        splits: it may have two optimizers.
        edits: it may write into weights and gradients.
    """
    draw, draw_form = random.Random(seed), random.Random(-seed - 1)  # noqa: S311  no secret
    first_size = size = draw.choice([1, 2, 3])
    windows: list[WindowPlan] = []
    for number in range(draw.choice([4, 6])):
        before = [each for each in ("rate", "load", "resize", "evaluate") if draw.random() < 0.15]
        if edits and draw.random() < 0.15:
            before.append("edit")
        if draw.random() < 0.2 and not (number and windows[-1].is_dropped):  # else gradients may be left
            before.append("save")
        if "resize" in before:
            size = draw.choice([1, 2, 3])
        is_dropped = draw.random() < 0.25
        kinds = [draw.choice(MICRO_BATCHES) for _ in range(size)]
        if kinds[0] == "no backward":
            kinds[0] = "one loss"
        if kinds[-1] == "no backward" and not is_dropped:
            kinds[-1] = "one loss"  # it reduces what the others have left
        limit = draw.choice([None, None, "norm", "value"]) if kinds[-1] != "no backward" else None
        windows.append(
            WindowPlan(
                form=draw_form.choice(["accumulate", "accumulate", "windows", "items"]),
                before=tuple(before),
                micro_batches=tuple(kinds),
                limit=limit,
                halves_gradients=edits and draw.random() < 0.15,
                is_dropped=is_dropped,
            )
        )
    return Program(
        seed=seed,
        dtype=dtype,
        optimizer=draw.choice(["SGD", "momentum", "AdamW"]),
        clears=draw.choice(["after", "before", "both", "in place", "of the model", "after forward"]),
        schedules=draw.random() < 0.5,
        splits=splits and draw.random() < 0.3,
        size=first_size,
        windows=tuple(windows),
    )


class Net(nn.Module):
    """Three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second(torch.relu(self.first(x)))
        return self.last(torch.tanh(hidden))  # type: ignore[no-any-return]


def train(program: Program, accelerator: Accelerator, folder: str) -> list[dict[str, Tensor]]:
    """Return whole weights after each window. Collective.

    Args:
        program: of `make_program`.
        accelerator: without prepared objects.
        folder: for saved states.
    """
    return _run(program, _Prepared(program, accelerator, folder))


def require_equal(
    found: list[dict[str, Tensor]], program: Program, ranks: int, precision: str = "no", *, atol: float = 0
) -> None:
    """Raise AssertionError where `train` gave other weights than plain PyTorch.

    ranks: those that read different batches. atol: the largest difference of a weight that is none.
    """
    wanted = train_plainly(program, ranks, precision)
    for number, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        for name, value in theirs.items():
            away = (ours[name].to(value) - value).abs().max().item()
            assert away <= atol, f"{name} is {away:.1e} off after window {number} of\n{program}"


def train_plainly(program: Program, ranks: int, precision: str = "no") -> list[dict[str, Tensor]]:
    """Return the weights of plain PyTorch, with the batches of all ranks.

    precision: "no", "bf16" or "fp16", which has the loss scale `SCALE`.
    """
    return _run(program, _Plain(program, ranks, precision))


class _Prepared:
    calls_always = True
    """Optimizers and schedulers are called in each micro-batch."""

    def __init__(self, program: Program, accelerator: Accelerator, folder: str) -> None:
        self.accelerator, self.folder, self.is_saved = accelerator, folder, False
        accelerator.gradient_accumulation_steps = program.size
        self.dtype = program.dtype
        model, optimizers, schedulers = _objects(program)
        self.model, *others = accelerator.prepare(model, *optimizers, *schedulers)
        self.optimizers, self.schedulers = others[: len(optimizers)], others[len(optimizers) :]
        topology = accelerator.run.topology
        self.ranks, self.rank = topology.readers, topology.reader

    def micro_batches(self, form: str, items: list[list[int]]) -> Iterator[int]:
        """Give the number of each micro-batch of a window, inside its context."""
        places: Iterable[int] = range(len(items))
        if form == "accumulate":
            for place in places:
                with self.accelerator.accumulate(self.model):
                    yield place
            return
        count = (lambda place: items[place][self.rank]) if form == "items" else None
        for window in self.accelerator.windows(places, self.model, items=count, size=len(items)):
            yield from window

    def rows(self, batch: Tensor) -> Tensor:
        """Return this rank's rows of a batch of all ranks."""
        begin = self.rank * ROWS
        return batch[begin : begin + ROWS]

    def loss(self, values: Tensor, items: list[int] | None) -> Tensor:
        """Return the mean of this rank's values, times its items."""
        mean = values.mean()
        return mean if items is None else mean * items[self.rank]

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)  # type: ignore[no-any-return]

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)

    def limit(self, by: str) -> None:
        if by == "norm":
            self.accelerator.clip_grad_norm_(self.model.parameters(), NORM)
        else:
            self.accelerator.clip_grad_value_(self.model.parameters(), VALUE)

    def unscale(self) -> None:
        self.accelerator.unscale_gradients()

    def resize(self, size: int) -> None:
        self.accelerator.gradient_accumulation_steps = size

    def save(self) -> None:
        self.accelerator.save_state(self.folder)
        self.is_saved = True

    def load(self) -> None:
        if self.is_saved:
            self.accelerator.load_state(self.folder)

    def end_window(self) -> dict[str, Tensor]:
        state = self.accelerator.get_state_dict(self.model, rank0_only=False)
        return {name: value.detach().clone() for name, value in state.items()}


class _Plain:
    calls_always = False

    def __init__(self, program: Program, ranks: int, precision: str) -> None:
        self.size, self.ranks, self.divisor = program.size, ranks, program.size
        self.dtype = program.dtype
        self.model, optimizers, self.schedulers = _objects(program)
        scales = precision == "fp16"
        self.scaler = GradScaler("cpu", init_scale=SCALE, growth_interval=10**6, enabled=scales)
        self.optimizers = [_Scaled(each, self.scaler) if scales else each for each in optimizers]
        self.half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
        self.saved: Any = None

    def micro_batches(self, form: str, items: list[list[int]]) -> Iterator[int]:
        sizes = {"accumulate": self.size, "windows": len(items)}
        self.divisor = sizes.get(form) or sum(map(sum, items)) or 1
        yield from range(len(items))

    def rows(self, batch: Tensor) -> Tensor:
        return batch

    def loss(self, values: Tensor, items: list[int] | None) -> Tensor:
        if items is None:
            return values.mean()
        parts = zip(values.chunk(self.ranks), items, strict=True)
        return torch.stack([part.mean() * count for part, count in parts]).sum()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=self.half, enabled=self.half is not None):
            made: Tensor = self.model(x)
        return made.to(self.dtype)

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss / self.divisor).backward()

    def limit(self, by: str) -> None:
        self.unscale()
        if by == "norm":
            nn.utils.clip_grad_norm_(self.model.parameters(), NORM)
        else:
            nn.utils.clip_grad_value_(self.model.parameters(), VALUE)

    def unscale(self) -> None:
        for optimizer in self.optimizers:
            if isinstance(optimizer, _Scaled):
                optimizer.unscale()

    def resize(self, size: int) -> None:
        self.size = size

    def _stateful(self) -> list[Any]:
        inner = [each.inner if isinstance(each, _Scaled) else each for each in self.optimizers]
        return [self.model, *inner, *self.schedulers]

    def save(self) -> None:
        self.saved = copy.deepcopy([each.state_dict() for each in self._stateful()])

    def load(self) -> None:
        if self.saved is not None:
            for each, state in zip(self._stateful(), copy.deepcopy(self.saved), strict=True):
                each.load_state_dict(state)
            self.model.zero_grad()  # a loaded state has no gradients

    def end_window(self) -> dict[str, Tensor]:
        scaled = [each for each in self.optimizers if isinstance(each, _Scaled) and each.is_unscaled]
        for optimizer in scaled:
            optimizer.is_unscaled = False
        if scaled:
            self.scaler.update()
        return copy.deepcopy(self.model.state_dict())


class _Scaled:
    """An optimizer of plain PyTorch that steps by a loss scaler."""

    def __init__(self, inner: Optimizer, scaler: GradScaler) -> None:
        self.inner, self.scaler, self.is_unscaled = inner, scaler, False

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def unscale(self) -> None:
        if not self.is_unscaled:
            self.scaler.unscale_(self.inner)
            self.is_unscaled = True

    def step(self) -> None:
        self.unscale()
        self.scaler.step(self.inner)


def _objects(program: Program) -> tuple[nn.Module, list[Optimizer], list[StepLR]]:
    torch.manual_seed(program.seed)
    model = Net().to(program.dtype)
    parameters = list(model.parameters())
    parts = [parameters[:3], parameters[3:]] if program.splits else [parameters]
    optimizers = [OPTIMIZERS[program.optimizer](part) for part in parts]
    schedulers = [StepLR(each, 2, 0.7) for each in optimizers] if program.schedules else []
    return model, optimizers, schedulers


def _run(program: Program, trainer: _Prepared | _Plain) -> list[dict[str, Tensor]]:
    found = []
    for number, window in enumerate(program.windows):
        for what in window.before:
            _act(trainer, what, len(window.micro_batches))
        seeds = [(program.seed * 100 + number) * 10 + place for place in range(len(window.micro_batches))]
        items = [_items(seed, trainer.ranks) for seed in seeds]
        for place in trainer.micro_batches(window.form, items):
            counted = items[place] if window.form == "items" else None
            _micro_batch(program, trainer, window, place, seed=seeds[place], items=counted)
        found.append(trainer.end_window())
    return found


def _items(seed: int, ranks: int) -> list[int]:
    """Return how many items each rank has in a micro-batch."""
    draw = random.Random(seed)  # noqa: S311  no secret
    return [draw.choice([0, 1, 3, 10]) for _ in range(ranks)]


def _micro_batch(
    program: Program,
    trainer: _Prepared | _Plain,
    window: WindowPlan,
    place: int,
    *,
    seed: int,
    items: list[int] | None,
) -> None:
    is_last = place == len(window.micro_batches) - 1
    is_called = trainer.calls_always or is_last
    if program.clears in ("before", "both") and (trainer.calls_always or place == 0):
        _clear(trainer)
    clears = place == 0 and program.clears == "after forward"
    _learn(trainer, window.micro_batches[place], seed, items, clears=clears)
    if is_last:
        _change_gradients(trainer, window)
    if not window.is_dropped and is_called:
        for each in (*trainer.optimizers, *trainer.schedulers):
            each.step()
    if program.clears == "of the model" and is_last:
        trainer.model.zero_grad()
    if program.clears in ("after", "both", "in place") and is_called:
        _clear(trainer, set_to_none=program.clears != "in place")


def _act(trainer: _Prepared | _Plain, what: str, size: int) -> None:
    if what == "rate":
        for group in (group for each in trainer.optimizers for group in each.param_groups):
            group["lr"] *= 0.5
    elif what == "resize":
        trainer.resize(size)
    elif what == "save":
        trainer.save()
    elif what == "load":
        trainer.load()
    elif what == "evaluate":
        _evaluate(trainer)
    elif what == "edit":
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.mul_(0.97)


def _clear(trainer: _Prepared | _Plain, set_to_none: bool = True) -> None:
    for each in trainer.optimizers:
        each.zero_grad(set_to_none=set_to_none)


def _change_gradients(trainer: _Prepared | _Plain, window: WindowPlan) -> None:
    if window.halves_gradients:
        trainer.unscale()
        for parameter in trainer.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
    if window.limit is not None:
        trainer.limit(window.limit)


def _evaluate(trainer: _Prepared | _Plain) -> None:
    trainer.model.eval()
    with torch.no_grad():
        trainer.forward(_rows(trainer, 0))
    trainer.model.train()


def _learn(
    trainer: _Prepared | _Plain, kind: str, seed: int, items: list[int] | None, *, clears: bool
) -> None:
    def loss_of(made: Tensor) -> Tensor:
        return trainer.loss((made - 1).pow(2), items)

    x = _rows(trainer, seed)
    if kind == "evaluation":
        _evaluate(trainer)
    made = trainer.forward(x)
    if clears:
        trainer.model.zero_grad()
    if kind == "two losses":
        trainer.backward(loss_of(made) / 2)
        trainer.backward(loss_of(trainer.forward(x.flip(1))) / 2)
    elif kind == "two forwards":
        trainer.backward(loss_of(made + trainer.forward(x.flip(1))))
    elif kind == "other loss":
        trainer.backward(trainer.loss(made.abs(), items) * 3)
    elif kind != "no backward":
        trainer.backward(loss_of(made))


def _rows(trainer: _Prepared | _Plain, seed: int) -> Tensor:
    """Return this rank's rows of a batch that depends on the seed alone.

    Plain PyTorch has those of all ranks.
    """
    generator = torch.Generator().manual_seed(seed)
    batch = torch.randn(trainer.ranks * ROWS, 6, generator=generator, dtype=torch.float64)
    return trainer.rows(batch).to(trainer.dtype)

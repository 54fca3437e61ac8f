"""What a training step costs beyond the plain loop: a tiny model in fp32, so that little else is measured.

`python step.py [--peers PYTHON]` prints the rows; `python step.py NAME` is one contender, or a rank of one.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from functools import cache
from tempfile import mkdtemp

from arena import Contender, Row, contest, median, rounds, serve, table, worked

STEPS = 200
CASES = {
    "1": ("a step", 1, False, "≤ 4 µs"),
    "4": ("a micro-batch, accumulating 4", 4, False, "≤ 3 µs"),
    "1 clip": ("a step that clips", 1, True, "≤ 6 µs"),
    "4 clip": ("a micro-batch, accumulating 4, clipping each window", 4, True, "≤ 6 µs"),
}
FULL = "full"
"""A step with everything, as a share of the plain loop's: AdamW, clipping, a cosine schedule."""
DDP = "ddp"
"""`optimizer.step()` under ddp, on the first of two ranks."""
RECORD = "record"
"""A step of a run that keeps its record, beyond one of a run without a project folder."""
RECORD_LOOPS = 10
"""Loops that are measured as one, in turns, so that each figure has several samples."""


def measure(peers: str | None, count: int = 40) -> list[Row]:
    rows = []
    with contest("step.py", peers) as contenders:
        for case, (what, _, _, bar) in CASES.items():
            figures = rounds(contenders, case, count)
            found = [median(figures, name) for name in ("raw", "accelerate", "fabric", "ours")]
            rows.append(Row(f"{what}, over plain PyTorch", *found, bar, "µs"))
        figures = rounds(contenders, FULL, count)
        found = [median(figures, name) for name in ("raw", "accelerate", "fabric", "ours")]
        rows.append(Row("a step of AdamW with clip and scheduler, over plain", *found, "≤ 1.05", "of it"))
        figures = rounds({"ours": contenders["ours"]}, RECORD, count)
        what = "a step with a project folder, over one without"
        rows.append(Row(what, None, None, None, median(figures, "ours"), "≤ 1 µs", "µs"))
    ranks = Contender(DDP, sys.executable, "step.py", ranks=2)
    try:
        ranks.answers()
        found = statistics.median(ranks.turn(DDP) for _ in range(count))
    finally:
        ranks.end()
    return [*rows, Row("`optimizer.step()` under ddp, over plain", None, None, None, found, "≤ 0.3 µs", "µs")]


# -- the contenders --------------------------------------------------------------------------------


def parts(full: bool = False):
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = (torch.optim.AdamW if full else torch.optim.SGD)(model.parameters(), lr=1e-3)
    return model, optimizer, torch.randn(8, 16), torch.randn(8, 4), nn.functional.mse_loss


def schedule(optimizer, full: bool):
    from torch.optim.lr_scheduler import CosineAnnealingLR

    return CosineAnnealingLR(optimizer, 100_000) if full else None


def raw(size: int, clip: bool, full: bool = False) -> Callable[[], None]:
    from torch.nn.utils import clip_grad_norm_

    model, optimizer, inputs, targets, loss_of = parts(full)
    scheduler = schedule(optimizer, full)

    def run() -> None:
        for number in range(1, STEPS + 1):
            loss = loss_of(model(inputs), targets)
            (loss if size == 1 else loss / size).backward()
            if number % size == 0:
                if clip:
                    clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                if scheduler:
                    scheduler.step()
                optimizer.zero_grad()

    return run


def ours(size: int, clip: bool, full: bool = False, **options) -> Callable[[], None]:
    from accel_core import Accelerator

    return _accelerated(Accelerator(cpu=True, gradient_accumulation_steps=size, **options), clip, full)


@cache
def record_cost() -> Callable[[], float]:
    """What the record adds to a step, in two runs of one process."""
    without, with_record = ours(1, False), ours(1, False, project_dir=mkdtemp())

    def figure() -> float:
        added = 0.0
        for _ in range(RECORD_LOOPS):
            before, mine, after = (worked(loop) for loop in (without, with_record, without))
            added += mine - (before + after) / 2
        return added / (STEPS * RECORD_LOOPS)

    return figure


def accelerate(size: int, clip: bool, full: bool = False) -> Callable[[], None]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return _accelerated(Accelerator(cpu=True, gradient_accumulation_steps=size), clip, full)


def _accelerated(accelerator, clip: bool, full: bool) -> Callable[[], None]:
    model, optimizer, inputs, targets, loss_of = parts(full)
    scheduler = schedule(optimizer, full)
    model, optimizer = accelerator.prepare(model, optimizer)
    scheduler = accelerator.prepare(scheduler) if scheduler else None

    def run() -> None:
        for _ in range(STEPS):
            with accelerator.accumulate(model):
                loss = loss_of(model(inputs), targets)
                accelerator.backward(loss)
                if clip and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                if scheduler:
                    scheduler.step()
                optimizer.zero_grad()

    return run


def fabric(size: int, clip: bool, full: bool = False) -> Callable[[], None]:
    from lightning_fabric import Fabric

    lightning = Fabric(accelerator="cpu", devices=1)
    model, optimizer, inputs, targets, loss_of = parts(full)
    scheduler = schedule(optimizer, full)
    model, optimizer = lightning.setup(model, optimizer)

    def run() -> None:
        for number in range(1, STEPS + 1):
            boundary = number % size == 0
            with lightning.no_backward_sync(model, enabled=not boundary):
                loss = loss_of(model(inputs), targets)
                lightning.backward(loss if size == 1 else loss / size)
            if boundary:
                if clip:
                    lightning.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                if scheduler:
                    scheduler.step()
                optimizer.zero_grad()

    return run


def stepped_under_ddp() -> Callable[[], float]:
    """Steps alone: beside a backward, which takes a hundred times as long, they could not be seen."""
    from accel_core import Accelerator

    accelerator = Accelerator(cpu=True, strategy="ddp")
    model, checked, inputs, targets, loss_of = parts()
    prepared, _ = accelerator.prepare(model, checked)
    accelerator.backward(loss_of(prepared(inputs), targets))
    plain = type(checked)(model.parameters(), lr=1e-3)  # of the same tensors, for equal caches

    def cost(optimizer) -> float:
        def run() -> None:
            for _ in range(STEPS):
                optimizer.step()

        return worked(run) / STEPS

    def figure() -> float:
        cost(plain)
        before, mine, after = cost(plain), cost(checked), cost(plain)
        return mine - (before + after) / 2

    return figure


def contend(name: str) -> None:
    """Each case made when it is first asked for: Accelerate has one state a process.

    A plain loop takes turns with the contender inside its process: two processes of the very same
    loop differ by more than what is measured here.
    """
    if name == DDP:
        serve({DDP: stepped_under_ddp()})
        return
    make = {"raw": raw, "raw-peers": raw, "ours": ours, "accelerate": accelerate, "fabric": fabric}[name]
    made: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {}

    def figure(case: str) -> float:
        if case not in made:
            options = (1, True, True) if case == FULL else CASES[case][1:3]
            made[case] = raw(*options), make(*options)
        plain, own = made[case]
        plain()  # the turn's first loop finds cold caches, and is not counted
        before, mine, after = (worked(loop) / STEPS for loop in (plain, own, plain))
        if case == FULL:
            return mine / ((before + after) / 2)
        return mine if make is raw else mine - (before + after) / 2

    cases = {case: lambda case=case: figure(case) for case in (*CASES, FULL)}
    serve({**cases, RECORD: lambda: record_cost()()} if name == "ours" else cases)  # noqa: PLW0108  late


if __name__ == "__main__":
    if len(sys.argv) == 2:
        contend(sys.argv[1])
    else:
        print(table(measure(sys.argv[2] if "--peers" in sys.argv else None)))

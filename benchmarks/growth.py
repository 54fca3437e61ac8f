"""How cost grows with leaves, parameters, ranks and samples: each at three sizes.

`python growth.py [--quick]` prints the table: CPU time of one process. A cost that bends up is a defect: the
last column, what one of them costs at the largest size over the smallest, is then well above 1.
"""

from __future__ import annotations

import gc
import logging
import pickle
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from accel_core import Accelerator
from accel_core.checkpoint.session import without_collecting_garbage
from accel_core.storage.leaves import Box, Declared
from accel_core.storage.plan import gather_groups, plan

LEAVES, SHAPES = 1000, 10
"""Of each rank, where ranks grow."""


class Line(NamedTuple):
    """A cost at three sizes, that `--quick` divides by ten."""

    what: str
    of: str
    sizes: tuple[int, int, int]
    cost: Callable[[int], float]
    """Milliseconds."""


def measure(*, quick: bool = False, count: int = 3) -> list[tuple[Line, list[int], list[float]]]:
    """(line, sizes, median costs) of each; the first round is not counted."""
    logging.disable(logging.WARNING)  # that loaders go on in the middle
    found = []
    for line in LINES:
        sizes = [size // 10 if quick else size for size in line.sizes]
        costs = []
        for size in sizes:
            rounds = [line.cost(size) for _ in range(1 + (1 if quick else count))]
            costs.append(statistics.median(rounds[1:] or rounds))
        found.append((line, sizes, costs))
    return found


def table(found: Sequence[tuple[Line, list[int], list[float]]]) -> str:
    """The lines as markdown."""
    lines = ["| what | of | smallest | middle | largest | one of them, largest over smallest |"]
    lines.append("|---|---|---|---|---|---|")
    for line, sizes, costs in found:
        cells = [f"{size:,}: {cost:.3g} ms" for size, cost in zip(sizes, costs, strict=True)]
        bend = costs[-1] * sizes[0] / (max(costs[0], 1e-9) * sizes[-1])
        lines.append(f"| {line.what} | {line.of} | {' | '.join(cells)} | {bend:.2g} |")
    return "\n".join(lines)


def _worked(call: Callable[[], object]) -> float:
    """Milliseconds of CPU time."""
    gc.collect()
    started = time.process_time()
    call()
    return 1e3 * (time.process_time() - started)


# -- leaves and parameters ---------------------------------------------------------------------------------


def _many(number: int) -> nn.Module:
    return nn.ParameterList(torch.zeros(64) for _ in range(number))


def _prepares(number: int) -> float:
    accelerator, model = Accelerator(cpu=True), _many(number)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    spent = _worked(lambda: accelerator.prepare(model, optimizer))
    accelerator.end_training()
    return spent


def _saves(number: int) -> float:
    return _of_checkpoint(number)[0]


def _loads(number: int) -> float:
    return _of_checkpoint(number)[1]


def _of_checkpoint(number: int) -> tuple[float, float]:
    """A second save, and a load of it."""
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(_many(number))
    with TemporaryDirectory() as folder:
        accelerator.save_state(folder + "/first")
        saved = _worked(lambda: accelerator.save_state(folder + "/second"))
        loaded = _worked(lambda: accelerator.load_state(folder + "/second"))
    accelerator.end_training()
    return saved, loaded


# -- ranks -------------------------------------------------------------------------------------------------


class _ToldError(Exception):
    """A rank has told the others what it declares."""


class _Ranks:
    """One rank among many that do not exist: it tells, or hears what all have told."""

    def __init__(self, rank: int, told: list[bytes], *, hears: bool) -> None:
        self.rank, self._told, self._hears = rank, told, hears

    def together(self, step: str, action: Callable[[], Any]) -> list[Any]:
        value = action()
        if self._hears:
            return [pickle.loads(each) for each in self._told]
        self._told.append(pickle.dumps(value))
        raise _ToldError


def _declared(rank: int, ranks: int, *, sharded: bool) -> dict[tuple[str, str], Declared]:
    kinds = []
    for number in range(1, SHAPES + 1):
        rows = number * ranks
        box = Box((rank * number, 0), (number, 64)) if sharded else Box((0, 0), (rows, 64))
        parts: Any = ("like_param", (rows, 64), None, not sharded, True, (torch.float32,), (box,))
        kinds.append(Declared(*parts))
    return {("unit0", f"model/layers.{leaf}.weight"): kinds[leaf % SHAPES] for leaf in range(LEAVES)}


def _plans(ranks: int, *, sharded: bool) -> float:
    """What one rank does after all have told what they declare."""
    told: list[bytes] = []
    for rank in range(ranks):
        try:
            gather_groups(_Ranks(rank, told, hears=False), _declared(rank, ranks, sharded=sharded), int)
        except _ToldError:
            continue
    mine, comm = _declared(0, ranks, sharded=sharded), _Ranks(0, told, hears=True)
    with without_collecting_garbage():  # as a save does
        return _worked(lambda: plan(gather_groups(comm, mine, _unchecked)[1], 0, [0] * ranks))


def _unchecked() -> None:
    pass


# -- samples -----------------------------------------------------------------------------------------------


class _Numbers(Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def _resumes(length: int, *, shuffle: bool) -> float:
    """The first batch after a load in the middle of an epoch."""
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(_Numbers(length), batch_size=4, shuffle=shuffle))
    loader.load_state_dict(
        {**loader.state_dict(), "consumed": length // 8 * 4, "drawn": 1 if shuffle else None}
    )
    spent = _worked(lambda: next(iter(loader)))
    accelerator.end_training()
    return spent


def _shuffles(length: int) -> float:
    return _worked(lambda: next(iter(DataLoader(_Numbers(length), batch_size=4, shuffle=True))))


LINES = [
    Line("`prepare` of a model and its optimizer", "parameters", (10**3, 10**4, 10**5), _prepares),
    Line("`save_state`, the second one", "leaves", (10**3, 10**4, 4 * 10**4), _saves),
    Line("`load_state`", "leaves", (10**3, 10**4, 4 * 10**4), _loads),
    Line(
        f"plan of a first save, {LEAVES:,} leaves, sharded",
        "ranks",
        (160, 1024, 4096),
        lambda ranks: _plans(ranks, sharded=True),
    ),
    Line(
        f"plan of a first save, {LEAVES:,} leaves, replicated",
        "ranks",
        (160, 1024, 4096),
        lambda ranks: _plans(ranks, sharded=False),
    ),
    Line(
        "first batch after a resume, in order",
        "samples",
        (10**6, 10**9, 10**12),
        lambda length: _resumes(length, shuffle=False),
    ),
    Line(
        "first batch after a resume, shuffled",
        "samples",
        (10**5, 10**6, 10**7),
        lambda length: _resumes(length, shuffle=True),
    ),
    Line("first batch of torch's own loader, shuffled", "samples", (10**5, 10**6, 10**7), _shuffles),
]

if __name__ == "__main__":
    print(table(measure(quick="--quick" in sys.argv)))

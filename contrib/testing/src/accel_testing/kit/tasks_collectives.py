"""The collectives of level 3: nested structures, objects, disagreement."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from accel_core import Accelerator, CollectiveError, ops
from accel_testing.kit.tasks import make

__all__ = ["DTYPES", "LARGE", "disagreement", "kinds", "objects"]

DTYPES = (
    *(torch.bool, torch.uint8, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32),
)
LARGE = 40_000
"""Elements; more than travels along with a check of the ranks."""


class Pair(NamedTuple):
    """A structure with a type of its own."""

    first: Any
    second: Any


def kinds(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Dtypes, layouts and sizes; reader r gives r + 1."""
    accelerator = make(arguments)
    device, number = accelerator.device, accelerator.run.topology.reader + 1

    def each_dtype(size: int) -> list[tuple[bool, bool]]:
        found = []
        for dtype in DTYPES:
            gathered = ops.gather(torch.full((size,), number, device=device).to(dtype), run=accelerator.run)
            expected = torch.arange(1, len(gathered) // size + 1).repeat_interleave(size).to(dtype)
            found.append((gathered.dtype is dtype, torch.equal(gathered.cpu(), expected)))
        return found

    weight = torch.ones(2, device=device, requires_grad=True)
    odd = OrderedDict(
        empty=torch.empty(0, 3, device=device),
        turned=(torch.arange(6, device=device).view(2, 3) * number).T,
        pair=Pair(weight * number, None),
    )
    gathered = ops.gather(odd, run=accelerator.run)
    found = {
        "small": each_dtype(3),
        "large": each_dtype(LARGE),
        "types": (type(gathered).__name__, type(gathered["pair"]).__name__, gathered["pair"].second),
        "empty": tuple(gathered["empty"].shape),
        "turned": gathered["turned"][:, 1].tolist(),
        "gradient": gathered["pair"].first.requires_grad,
        "least": ops.reduce(
            torch.tensor([number, -number], device=device), "min", run=accelerator.run
        ).tolist(),
        "count": ops.reduce(torch.tensor(number == 1, device=device), "sum", run=accelerator.run).item(),
        "each": accelerator.run.topology.losses // accelerator.run.topology.readers,
    }
    accelerator.end_training()
    return found


def objects(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Picklable objects, small and large, from all readers and from the last rank."""
    accelerator = make(arguments)
    run, rank = accelerator.run, accelerator.process_index
    reader, last = run.topology.reader, accelerator.num_processes - 1
    found = {
        "gathered": ops.gather_object([{"reader": reader}], run=run),
        "large": [len(text) for text in ops.gather_object(["x" * LARGE * (reader + 1)], run=run)],
        "sent": ops.broadcast_object_list([f"from {rank}", {"rank": rank}], last, run=run),
        "directly": run.collectives("control").broadcast_object(rank, last),
    }
    ops.wait_for_everyone(run=run)
    accelerator.end_training()
    return found


def disagreement(arguments: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return the error of each case, in debug mode, in which all devices compare."""
    os.environ["ACCEL_DEBUG"] = "1"
    accelerator = make(arguments)
    first, device, run = accelerator.is_main_process, accelerator.device, accelerator.run
    tensor = torch.ones(2, device=device)
    cases: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "shape": (lambda: ops.broadcast(tensor, run=run), lambda: ops.broadcast(tensor[:1], run=run)),
        "dtype": (lambda: ops.broadcast(tensor, run=run), lambda: ops.broadcast(tensor.int(), run=run)),
        "structure": (lambda: ops.broadcast([tensor], run=run), lambda: ops.broadcast(tensor, run=run)),
        "operation": (lambda: ops.broadcast(tensor, run=run), lambda: ops.wait_for_everyone(run=run)),
    }
    found = {name: _shown(accelerator, case[not first]) for name, case in cases.items()}
    accelerator.end_training()
    return found


def _shown(accelerator: Accelerator, call: Callable[[], Any]) -> tuple[str, ...]:
    try:
        call()
    except CollectiveError as error:
        accelerator.wait_for_everyone()  # the group is as good as before
        return tuple(error.found)
    return ()

"""`gather` of a dict of 64 small tensors on two gloo ranks. Plain PyTorch: one collective for all, by hand.

`python gather.py [--peers PYTHON]` prints the row; `python gather.py NAME` is one rank of one contender.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from arena import Row, contest, median, rounds, serve, table, timed

TENSORS, ROWS, TIMES = 64, 8, 5


def measure(peers: str | None, count: int = 15) -> list[Row]:
    with contest("gather.py", peers, ranks=2) as contenders:
        figures = rounds(contenders, "gather", count)
    found = [median(figures, name) for name in ("raw", "accelerate", "fabric", "ours")]
    milliseconds = [None if figure is None else figure / 1e3 for figure in found]
    return [Row(f"`gather` of {TENSORS} small tensors, 2 ranks", *milliseconds, "≤ 1 ms", "ms")]


# -- the contenders --------------------------------------------------------------------------------


def tree():
    import torch

    return {f"tensor{number}": torch.randn(ROWS) for number in range(TENSORS)}


def raw() -> Callable[[], object]:
    import torch
    from torch import distributed

    distributed.init_process_group("gloo")
    values = tree()

    def gather() -> dict[str, torch.Tensor]:
        flat = torch.cat(list(values.values()))
        ranks = [torch.empty_like(flat) for _ in range(2)]
        distributed.all_gather(ranks, flat)
        columns = torch.stack(ranks).view(2, TENSORS, ROWS).unbind(1)
        return {name: column.reshape(-1) for name, column in zip(values, columns, strict=True)}

    return gather


def ours() -> Callable[[], object]:
    from accel_core import Accelerator

    accelerator, values = Accelerator(cpu=True), tree()
    return lambda: accelerator.gather(values)


def accelerate() -> Callable[[], object]:
    from accelerate import Accelerator

    accelerator, values = Accelerator(cpu=True), tree()
    assert accelerator.num_processes == 2
    return lambda: accelerator.gather(values)


def fabric() -> Callable[[], object]:
    import os

    from lightning_fabric import Fabric

    os.environ["GROUP_RANK"] = "0"
    os.environ["TORCHELASTIC_RUN_ID"] = "benchmark"  # so that it starts no process of its own
    lightning, values = Fabric(accelerator="cpu", devices=2, strategy="ddp"), tree()
    lightning.launch()
    assert lightning.world_size == 2
    return lambda: lightning.all_gather(values)


def contend(name: str) -> None:
    make = {"raw": raw, "raw-peers": raw, "ours": ours, "accelerate": accelerate, "fabric": fabric}[name]
    gather = make()
    serve({"gather": lambda: timed(gather, TIMES)})


if __name__ == "__main__":
    if len(sys.argv) == 2:
        contend(sys.argv[1])
    else:
        print(table(measure(sys.argv[2] if "--peers" in sys.argv else None)))

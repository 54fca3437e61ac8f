"""`gather` of a dict of small tensors on two gloo ranks. Plain PyTorch: one collective for all, by hand.

`python gather.py [--peers PYTHON]` prints the rows; `python gather.py NAME` is one rank of one contender.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from arena import Row, contest, median, rounds, serve, table, timed

LEAVES, ROWS, TIMES = (1, 16, 64, 512), 8, 5


def measure(peers: str | None, count: int = 15) -> list[Row]:
    rows = []
    with contest("gather.py", peers, ranks=2) as contenders:
        for leaves in LEAVES:
            figures = rounds(contenders, str(leaves), count)
            found = [median(figures, name) for name in ("raw", "accelerate", "fabric", "ours")]
            milliseconds = [None if figure is None else figure / 1e3 for figure in found]
            bar = "≤ 1 ms" if leaves == 64 else ""
            tensors = f"{leaves} small tensors" if leaves > 1 else "one small tensor"
            rows.append(Row(f"`gather` of {tensors}, 2 ranks", *milliseconds, bar, "ms"))
    return rows


# -- the contenders --------------------------------------------------------------------------------


def tree(leaves: int):
    import torch

    return {f"tensor{number}": torch.randn(ROWS) for number in range(leaves)}


def raw() -> Callable[[object], object]:
    import torch
    from torch import distributed

    distributed.init_process_group("gloo")

    def gather(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        flat = torch.cat(list(values.values()))
        ranks = [torch.empty_like(flat) for _ in range(2)]
        distributed.all_gather(ranks, flat)
        columns = torch.stack(ranks).view(2, len(values), ROWS).unbind(1)
        return {name: column.reshape(-1) for name, column in zip(values, columns, strict=True)}

    return gather


def ours() -> Callable[[object], object]:
    from accel_core import Accelerator

    return Accelerator(cpu=True).gather


def accelerate() -> Callable[[object], object]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    return accelerator.gather


def fabric() -> Callable[[object], object]:
    import os

    from lightning_fabric import Fabric

    os.environ["GROUP_RANK"] = "0"
    os.environ["TORCHELASTIC_RUN_ID"] = "benchmark"  # so that it starts no process of its own
    lightning = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    lightning.launch()
    assert lightning.world_size == 2
    return lightning.all_gather


def contend(name: str) -> None:
    make = {"raw": raw, "raw-peers": raw, "ours": ours, "accelerate": accelerate, "fabric": fabric}[name]
    gather = make()

    def case(values: object) -> Callable[[], float]:
        return lambda: timed(lambda: gather(values), TIMES)

    serve({str(leaves): case(tree(leaves)) for leaves in LEAVES})


if __name__ == "__main__":
    if len(sys.argv) == 2:
        contend(sys.argv[1])
    else:
        print(table(measure(sys.argv[2] if "--peers" in sys.argv else None)))

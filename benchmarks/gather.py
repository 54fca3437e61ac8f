"""`gather` of a nested dict of small tensors on two gloo ranks.

Plain PyTorch: one collective into one tensor for all, by hand.

`python gather.py [--peers PYTHON]` prints the rows; `python gather.py NAME` is one rank of one contender.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from operator import truediv

from arena import Row, contest, median, rounds, serve, table, timed

LEAVES, ROWS, TIMES = (1, 16, 64, 512), 8, 5
TOGETHER = 8  # tensors of an inner dict


def measure(peers: str | None, count: int = 15) -> list[Row]:
    rows = []
    with contest("gather.py", peers, ranks=2) as contenders:
        for leaves in LEAVES:
            figures = rounds(contenders, str(leaves), count)
            found = [median(figures, name) for name in ("raw", "accelerate", "fabric", "ours")]
            milliseconds = [None if figure is None else figure / 1e3 for figure in found]
            ratio = statistics.median(map(truediv, figures["ours"], figures["raw"]))
            bar = f"≤ 1.5 × by hand (now {ratio:.2f})" if leaves >= 64 else ""
            tensors = f"{leaves} small tensors" if leaves > 1 else "one small tensor"
            rows.append(Row(f"`gather` of {tensors}, 2 ranks", *milliseconds, bar, "ms"))
    return rows


# -- the contenders --------------------------------------------------------------------------------


def tree(leaves: int):
    import torch

    groups = [range(start, min(start + TOGETHER, leaves)) for start in range(0, leaves, TOGETHER)]
    return {
        f"group{group[0]}": {f"tensor{number}": torch.randn(ROWS) for number in group} for group in groups
    }


def raw() -> Callable[[object], object]:
    import torch
    from torch import distributed

    distributed.init_process_group("gloo")
    gather_into = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor

    def gather(values: dict[str, dict[str, torch.Tensor]]) -> dict[str, dict[str, torch.Tensor]]:
        flat = torch.cat([tensor for group in values.values() for tensor in group.values()])
        ranks = flat.new_empty(2 * len(flat))
        gather_into(ranks, flat)
        columns = iter(ranks.view(2, -1, ROWS).unbind(1))
        return {key: {name: next(columns).reshape(-1) for name in group} for key, group in values.items()}

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

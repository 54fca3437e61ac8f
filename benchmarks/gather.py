"""`gather` of a nested dict of small tensors on two gloo ranks, and of one large tensor with its gradient.

Plain PyTorch: one collective into one tensor for all, by hand. With gradients: a function of autograd, as
contrastive losses have it, whose backward adds up the ranks' gradients and takes the rank's own part.

`python gather.py [--peers PYTHON]` prints the rows; `python gather.py NAME` is one rank of one contender.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from functools import partial
from operator import truediv
from pathlib import Path

from arena import Row, contest, median, rounds, serve, table, timed

LEAVES, ROWS, TIMES = (1, 16, 64, 512), 8, 5
SAMPLES, FEATURES = 4096, 2048  # of a rank: 34 MB
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
        two = {name: contenders[name] for name in ("raw", "ours")}
        for case, what, unit in (("both", "forward and backward", "ms"), ("memory", "memory", "MB")):
            figures = rounds(two, case, count)
            ratio = statistics.median(map(truediv, figures["ours"], figures["raw"]))
            plain, mine = median(figures, "raw"), median(figures, "ours")
            name = f"{what} of `gather(..., gradients=True)` of 34 MB a rank, 2 ranks"
            rows.append(Row(name, plain, None, None, mine, f"≤ 1.1 × by hand (now {ratio:.2f})", unit))
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


def by_hand() -> Callable[[object], object]:
    """Return the usual function of autograd. The group is there."""
    import torch
    from torch import distributed

    gather_into = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(_, mine):
            gathered = mine.new_empty(2 * len(mine), *mine.shape[1:])
            gather_into(gathered, mine)
            return gathered

        @staticmethod
        def backward(_, gradient):
            total = gradient.clone()
            distributed.all_reduce(total)
            return total.chunk(2)[distributed.get_rank()]

    return Gather.apply


def both_ways(gather: Callable[[object], object]) -> dict[str, Callable[[], float]]:
    """Cases of a gather with gradients: milliseconds of both ways, and the most MB that they add."""
    import torch

    mine = torch.randn(SAMPLES, FEATURES, requires_grad=True)
    upstream = torch.randn(2 * SAMPLES, FEATURES)

    def once() -> None:
        gather(mine).backward(upstream)
        mine.grad = None

    def added() -> float:
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
        before = _status("VmRSS")
        once()
        return (_status("VmHWM") - before) / 1e3

    return {"both": lambda: timed(once) / 1e3, "memory": added}


def _status(name: str) -> int:
    """kB of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


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

    with_gradients = {"raw": by_hand, "ours": lambda: partial(gather, gradients=True)}
    more = both_ways(with_gradients[name]()) if name in with_gradients else {}
    serve({str(leaves): case(tree(leaves)) for leaves in LEAVES} | more)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        contend(sys.argv[1])
    else:
        print(table(measure(sys.argv[2] if "--peers" in sys.argv else None)))

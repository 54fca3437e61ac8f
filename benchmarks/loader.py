"""What a batch of a prepared DataLoader costs beyond torch's own.

`python loader.py [--peers PYTHON]` prints the row; `python loader.py NAME` is one contender.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

from arena import Row, contest, median, rounds, serve, table, worked

BATCHES = 1000


def measure(peers: str | None, count: int = 40) -> list[Row]:
    with contest("loader.py", peers) as contenders:
        figures = rounds(contenders, "epoch", count)
    found = [median(figures, name) for name in ("raw", "accelerate", "fabric", "ours")]
    return [Row("a batch of a DataLoader, over torch's", *found, "≤ 0.5 µs", "µs")]


# -- the contenders --------------------------------------------------------------------------------


def raw() -> Iterable[object]:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    return DataLoader(TensorDataset(torch.randn(BATCHES * 4, 4)), batch_size=4)


def ours() -> Iterable[object]:
    from accel_core import Accelerator

    return Accelerator(cpu=True).prepare(raw())


def accelerate() -> Iterable[object]:
    from accelerate import Accelerator

    return Accelerator(cpu=True).prepare(raw())


def fabric() -> Iterable[object]:
    from lightning_fabric import Fabric

    return Fabric(accelerator="cpu", devices=1).setup_dataloaders(raw())


def contend(name: str) -> None:
    """torch's own loader takes turns with the contender inside its process: two processes differ by luck."""
    make: Callable[[], Iterable[object]]
    make = {"raw": raw, "raw-peers": raw, "ours": ours, "accelerate": accelerate, "fabric": fabric}[name]
    plain, own = raw(), make()

    def batch(loader: Iterable[object]) -> float:
        def epoch() -> None:
            for _ in loader:
                pass

        return worked(epoch) / BATCHES

    def figure() -> float:
        before, mine, after = batch(plain), batch(own), batch(plain)
        return mine if make is raw else mine - (before + after) / 2

    serve({"epoch": figure})


if __name__ == "__main__":
    if len(sys.argv) == 2:
        contend(sys.argv[1])
    else:
        print(table(measure(sys.argv[2] if "--peers" in sys.argv else None)))

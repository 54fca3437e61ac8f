"""How long a device waits for batches from the host.

`python feeding.py [--peers PYTHON] [--rounds N]` prints the row: the percentage of an epoch, from its first
batch on, in which the device stands between two steps, by its own events. A step is matrix products of one
millisecond. Four workers read; plain PyTorch pins their batches and moves them without waiting.
`python feeding.py NAME` is one contender. Without an accelerator it computes on the CPU, where nothing moves.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from typing import Any

from arena import Row, contest, median, rounds, serve, table

STEPS, ROWS, WIDTH, WORKERS = 1000, 64, 1024, 4


def measure(peers: str | None, count: int = 10) -> list[Row]:
    with contest("feeding.py", peers) as contenders:
        figures = rounds(contenders, "wait", count)
    found = [median(figures, name) for name in ("raw", "accelerate", "fabric", "ours")]
    return [Row("a device that stands between steps of 1 ms", *found, "≤ 1 %", "%")]


# -- the contenders --------------------------------------------------------------------------------


def loader(**options: Any) -> Any:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    data = TensorDataset(torch.zeros(STEPS * ROWS, WIDTH))
    return DataLoader(data, ROWS, num_workers=WORKERS, persistent_workers=True, **options)


def device() -> Any:
    import torch

    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def raw() -> Callable[[], Iterable[Any]]:
    on = device()
    found = loader(pin_memory=on.type != "cpu")
    return lambda: ([x.to(on, non_blocking=True)] for (x,) in found)


def ours() -> Callable[[], Iterable[Any]]:
    from accel_core import Accelerator

    found = Accelerator().prepare(loader())
    return lambda: found


def accelerate() -> Callable[[], Iterable[Any]]:
    from accelerate import Accelerator

    found = Accelerator().prepare(loader())
    return lambda: found


def fabric() -> Callable[[], Iterable[Any]]:
    from lightning.fabric import Fabric

    found = Fabric(devices=1).setup_dataloaders(loader())
    return lambda: found


def contend(name: str) -> None:
    import torch

    makers = {"raw": raw, "raw-peers": raw, "accelerate": accelerate, "fabric": fabric, "ours": ours}
    make = makers[name]()
    on = device()
    sync = torch.accelerator.synchronize if on.type != "cpu" else lambda: None
    side, dtype = (128, torch.float32) if on.type == "cpu" else (4096, torch.bfloat16)
    weight = torch.randn(side, side, device=on, dtype=dtype)

    def product() -> None:
        weight @ weight

    def mark() -> Any:
        """Return this moment of the device; of this process, if it computes itself."""
        if on.type == "cpu":
            return time.perf_counter()
        event = torch.Event(on, enable_timing=True)
        event.record()
        return event

    def between(begin: Any, end: Any) -> float:
        return (end - begin) * 1e3 if on.type == "cpu" else begin.elapsed_time(end)

    def products(count: int) -> float:
        """Return how many milliseconds so many take."""
        begin = mark()
        for _ in range(count):
            weight @ weight
        end = mark()
        sync()
        return between(begin, end)

    products(20)
    count = max(1, round(100 / products(100)))

    def wait() -> float:
        marks = []
        for (x,) in make():
            marks.append(mark())
            x.sum()
            for _ in range(count):
                weight @ weight
            marks.append(mark())
        sync()
        idle = sum(between(end, begin) for end, begin in zip(marks[1:-1:2], marks[2::2], strict=True))
        return idle / between(marks[0], marks[-1]) * 100

    serve({"wait": wait})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("contender", nargs="?")
    parser.add_argument("--peers", metavar="PYTHON", help="interpreter that has accelerate and lightning")
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    if args.contender:
        contend(args.contender)
    else:
        print(table(measure(args.peers, args.rounds)))


if __name__ == "__main__":
    main()

"""How long a device waits for batches from the host, beside epochs over batches that are there already.

`python feeding.py [--peers PYTHON] [--rounds N]` prints the row: percent of a step of one millisecond, whose
work is matrix products. Four workers read; plain PyTorch pins their batches and moves them without waiting.
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
    return [Row("a step of 1 ms on the device, waiting for its batch", *found, "≤ 1 %", "%")]


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

    def took(call: Callable[[], object]) -> float:
        sync()
        started = time.perf_counter()
        call()
        sync()
        return time.perf_counter() - started

    took(lambda: [product() for _ in range(20)])
    products = max(1, round(1e-3 * 100 / took(lambda: [product() for _ in range(100)])))
    there = [[torch.randn(ROWS, WIDTH, device=on)] for _ in range(4)] * (STEPS // 4)

    def epoch(batches: Iterable[Any]) -> None:
        for (x,) in batches:
            x.sum()
            for _ in range(products):
                product()

    def wait() -> float:
        base = took(lambda: epoch(there))
        return (took(lambda: epoch(make())) - base) / base * 100

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

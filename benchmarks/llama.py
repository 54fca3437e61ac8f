"""A Llama-shaped model on one device by a hand-written loop, by Accelerate, by Fabric and by us.

`python llama.py [--peers PYTHON] [--rounds N]` prints a table, contenders taking turns: about a billion
weights in float32 under bfloat16 autocast, compiled block by block, scaled_dot_product_attention in its
flash kernel. Tokens a second, the share of the GPU's peak (MFU; the peak is its maker's figure), and the
memory at its highest. `--float8` compares float8 of torchao, and of Transformer Engine where it is
installed, with bfloat16, all by us. `--small` is a tiny model, for a machine without a GPU. `python llama.py
NAME` is one contender.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack, nullcontext
from importlib.util import find_spec
from typing import Any

from arena import ENVIRONMENT, Contender, serve
from fsdp import CPU, GPU, PEAK, build, give_back_memory

CONTENDERS = {
    "by hand": ("here", "torch"),
    "accelerate": ("peers", "accelerate"),
    "fabric": ("peers", "lightning"),
    "accel-core": ("here", "accel_core"),
}
"""Name -> whose interpreter, and what must be installed there."""
FLOAT8 = {"bf16": None, "fp8-torchao": "accel_torchao", "fp8-te": "transformer_engine"}
"""Precision -> what must be installed for it."""
SMALL = "ACCEL_BENCHMARK_SMALL"
"""Variable by which the contenders learn of `--small`."""


class Loop:
    """One contender: `step` trains on one batch, its weights are the user's own."""

    def __init__(self, name: str) -> None:
        import torch

        small = SMALL in os.environ
        self.on = torch.device("cpu") if small else torch.accelerator.current_accelerator()
        self.sizes = CPU if small else GPU
        self.model: Any = build(self.sizes).to(self.on)
        self.weights = sum(p.numel() for p in self.model.parameters())
        if not small:
            for block in self.model.blocks:
                block.compile()
        shape = self.sizes["batch"], self.sizes["length"]
        self.ids = torch.randint(self.sizes["vocabulary"], shape, device=self.on)
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=not small)
        {"by hand": self.by_hand, "accelerate": self.accelerate, "fabric": self.fabric}.get(name, self.ours)(
            name
        )

    def by_hand(self, _: str) -> None:
        import torch

        def step() -> None:
            with torch.autocast(self.on.type, torch.bfloat16):
                loss = self.model(self.ids)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()

        self.step = step

    def fabric(self, _: str) -> None:
        from lightning.fabric import Fabric

        fabric = Fabric(accelerator=self.on.type, devices=1, precision="bf16-mixed")
        model, optimizer = fabric.setup(self.model, self.optimizer)

        def step() -> None:
            fabric.backward(model(self.ids))
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()

        self.step = step

    def accelerate(self, _: str) -> None:
        from accelerate import Accelerator

        self._prepared(Accelerator(cpu=self.on.type == "cpu", mixed_precision="bf16"))

    def ours(self, name: str) -> None:
        from accel_core import Accelerator

        precision = name if name in FLOAT8 else "bf16"
        self._prepared(Accelerator(cpu=self.on.type == "cpu", mixed_precision=precision))

    def _prepared(self, accelerator: Any) -> None:
        model, optimizer = accelerator.prepare(self.model, self.optimizer)

        def step() -> None:
            with accelerator.accumulate(model):
                accelerator.backward(model(self.ids))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

        self.step = step

    def tokens(self) -> float:
        """Tokens a second, all of the device's work included."""
        import torch

        wait = torch.accelerator.synchronize if self.on.type != "cpu" else nullcontext
        times = 10 if self.on.type != "cpu" else 2
        self.step()  # which takes the memory again that the others had meanwhile
        wait()
        started = time.perf_counter()
        for _ in range(times):
            self.step()
        wait()
        seconds = time.perf_counter() - started
        give_back_memory()
        return times * self.ids.numel() / seconds

    def mfu(self, tokens: float) -> float:
        """Percent of the peak in bfloat16 that these tokens a second are; nan where that is not known."""
        import torch

        name = torch.cuda.get_device_name() if self.on.type == "cuda" else "cpu"
        peak = next((rate for word, rate in PEAK.items() if word in name), float("nan"))
        # Causal attention computes half of the 12 that all pairs take.
        attention = 6 * self.sizes["layers"] * self.sizes["width"] * self.sizes["length"]
        return tokens * (6 * self.weights + attention) / peak * 100


def contender(name: str) -> None:
    loop = Loop(name)
    for _ in range(3):
        loop.step()
    give_back_memory()
    seen = [0.0]

    def tokens() -> float:
        seen[0] = loop.tokens()
        return seen[0]

    def memory() -> float:
        import torch

        return torch.cuda.max_memory_allocated() / 2**30 if loop.on.type == "cuda" else float("nan")

    serve({"tokens /s": tokens, "MFU %": lambda: loop.mfu(seen[0]), "memory GiB": memory})


def contest(pythons: dict[str, str], count: int) -> str:
    """Return a table: the medians of rounds, and the median ratio to the first one's tokens."""
    cases = ("tokens /s", "MFU %", "memory GiB")
    found: dict[str, dict[str, list[float]]] = {}
    with ExitStack() as ends:
        contenders = {}
        for name, python in pythons.items():
            contenders[name] = Contender(name, python, "llama.py")
            ends.callback(contenders[name].end)
            contenders[name].answers()  # one after the other: each compiles
        for _ in range(count):
            for name, each in contenders.items():
                for case in cases:
                    found.setdefault(name, {}).setdefault(case, []).append(each.turn(case))
    lines = [f"| | {' | '.join(cases)} | × {next(iter(found))} |", "|" + "---|" * (len(cases) + 2)]
    base = next(iter(found.values()))["tokens /s"]
    for name, figures in found.items():
        medians = [statistics.median(figures[case]) for case in cases]
        cells = ["-" if math.isnan(figure) else f"{figure:.1f}" for figure in medians]
        pairs = zip(figures["tokens /s"], base, strict=True)
        ratio = statistics.median(mine / other for mine, other in pairs)
        lines.append(f"| {name} | {' | '.join(cells)} | {ratio:.3f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("contender", nargs="?", choices=[*CONTENDERS, *FLOAT8])
    parser.add_argument("--peers", metavar="PYTHON", help="interpreter that has accelerate and lightning")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--float8", action="store_true", help="float8 beside bfloat16")
    args = parser.parse_args()
    if args.contender:
        contender(args.contender)
        return
    if args.small:
        ENVIRONMENT[SMALL] = "1"
    if args.float8:
        has = [name for name, needed in FLOAT8.items() if needed is None or find_spec(needed)]
        print(contest(dict.fromkeys(has, sys.executable), args.rounds))
        return
    pythons = {"here": sys.executable, "peers": args.peers}
    wanted = {name: (pythons[where], needed) for name, (where, needed) in CONTENDERS.items()}
    has = {name: python for name, (python, needed) in wanted.items() if python and has_module(python, needed)}
    print(contest(has, args.rounds))


def has_module(python: str, name: str) -> bool:
    """Return True if this interpreter finds the module."""
    look = f"import importlib.util as it; raise SystemExit(it.find_spec({name!r}) is None)"
    return subprocess.run([python, "-c", look], check=False).returncode == 0


if __name__ == "__main__":
    main()

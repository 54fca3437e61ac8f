"""DeepSpeed by hand, by Accelerate and by us: a step of ZeRO 2 and 3, building the engine, a checkpoint.

`python zero.py [--peers PYTHON] [--rounds N] [--stage STAGE]` prints a table, contenders taking turns: two
gloo ranks with a small model in float32. All environments need deepspeed, whose parts are compiled at the
first start (minutes). Without a GPU, Accelerate 1.15 trains by DDP when it is asked for DeepSpeed, and says
nothing: its row then tells what DDP takes. `python zero.py NAME:STAGE` is one rank of a contender.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from arena import Contender, serve

CONTENDERS = {"by hand": "here", "accelerate": "peers", "accel-core": "here"}
WIDTH, LAYERS, BATCH, STEPS = 256, 12, 8, 20


class Loop:
    """One contender: `step`, `write`; `built`: the milliseconds that preparing took."""

    def __init__(self, name: str, stage: int) -> None:
        os.environ["DS_ACCELERATOR"] = "cpu"
        import torch
        from torch import nn

        torch.manual_seed(0)
        layers = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
        self.model: Any = nn.Sequential(*layers)
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.x = torch.randn(BATCH, WIDTH)
        self.folder = str(Path(tempfile.gettempdir(), "accel-benchmark-zero", name.replace(" ", "-")))
        self.settings = {
            "train_micro_batch_size_per_gpu": BATCH,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,
        }
        {"by hand": self.by_hand, "accelerate": self.accelerate, "accel-core": self.accel_core}[name]()

    def by_hand(self) -> None:
        import deepspeed
        import torch.distributed as dist

        dist.init_process_group("gloo")
        started = time.perf_counter()
        engine, *_ = deepspeed.initialize(
            model=self.model, optimizer=self.optimizer, config=self.settings, dist_init_required=False
        )
        self.built = time.perf_counter() - started

        def step() -> None:
            engine.backward(engine(self.x).square().mean())
            engine.step()

        self.step, self.write = step, lambda: engine.save_checkpoint(self.folder)

    def accelerate(self) -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo")  # by itself Accelerate asks for NCCL here
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        from accelerate import Accelerator, DeepSpeedPlugin

        self._prepared(Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=self.settings)))

    def accel_core(self) -> None:
        from accel_core import Accelerator
        from accel_deepspeed import DeepSpeedPlugin

        self._prepared(Accelerator(cpu=True, plugins=[DeepSpeedPlugin(hf_ds_config=self.settings)]))

    def _prepared(self, accelerator: Any) -> None:
        started = time.perf_counter()
        self.model, optimizer = accelerator.prepare(self.model, self.optimizer)
        self.built = time.perf_counter() - started

        def step() -> None:
            accelerator.backward(self.model(self.x).square().mean())
            optimizer.step()
            optimizer.zero_grad()

        self.step, self.write = step, lambda: accelerator.save_state(self.folder)


def contender(name: str) -> None:
    label, _, stage = name.partition(":")
    loop = Loop(label, int(stage))
    for _ in range(3):
        loop.step()

    def steps() -> float:
        started = time.perf_counter()
        for _ in range(STEPS):
            loop.step()
        return (time.perf_counter() - started) / STEPS * 1e3

    def save() -> float:
        shutil.rmtree(loop.folder, ignore_errors=True)
        started = time.perf_counter()
        loop.write()
        return (time.perf_counter() - started) * 1e3

    serve({"step": steps, "build": lambda: loop.built * 1e3, "save": save})


def contest(peers: str | None, stage: int, count: int) -> str:
    """A table: medians of rounds, and of their ratios to the loop by hand."""
    pythons = {"here": sys.executable, "peers": peers}
    cases = ("step", "build", "save")
    found: dict[str, dict[str, list[float]]] = {}
    with ExitStack() as ends:
        contenders = {}
        for name, where in CONTENDERS.items():
            if python := pythons[where]:
                contenders[name] = Contender(f"{name}:{stage}", python, "zero.py", 2)
                ends.callback(contenders[name].end)
                contenders[name].answers()
        for number in range(count + 1):
            for name, each in contenders.items():
                for case in cases:
                    figure = each.turn(case)
                    if number:
                        found.setdefault(name, {}).setdefault(case, []).append(figure)
    lines = [f"| stage {stage} | {' | '.join(cases)} |", "|---" * (len(cases) + 1) + "|"]
    for name, figures in found.items():
        cells = []
        for case in cases:
            pairs = zip(figures[case], found["by hand"][case], strict=True)
            ratio = statistics.median(one / other for one, other in pairs)
            cells.append(f"{statistics.median(figures[case]):.1f} ms ({ratio:.2f} ×)")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contender", nargs="?")
    parser.add_argument("--peers", metavar="PYTHON", help="interpreter that has accelerate and deepspeed")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stage", type=int, action="append", choices=(0, 1, 2, 3))
    args = parser.parse_args()
    if args.contender:
        contender(args.contender)
        return
    for stage in args.stage or (2, 3):
        print(contest(args.peers, stage, args.rounds), end="\n\n")
    print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()

"""Models larger than a device: accel-big-models beside Accelerate.

Each contender has a process of its own.

`python benchmarks/big_models.py [--blocks 13] [--rounds 3]` prints a table; it writes a checkpoint of
80 MB a block into a temporary folder. Contenders take turns, in the other order in each second round, with
the files in the page cache. Seconds and CPU seconds are the least of the rounds, for whatever else the
machine does only adds to them; ratios, whose parts alternate in one process, are medians.
Where storage is throttled, reads sleep; where computing is, too, the figure is that of the order of work
alone, whatever else the machine does.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

WIDTH = 1600
TURNS = 3
"""Forwards of which a figure is the median, within a round."""


class Block(nn.Module):
    """80 MB in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.first = nn.Linear(WIDTH, 4 * WIDTH)
        self.second = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.second(torch.relu(self.first(self.norm(x))))


class Model(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Asleep(nn.Module):
    """Computes for a time without a processor, as a device does."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.zeros(1 << 18))

    def forward(self, x):
        time.sleep(self.seconds)
        return x + self.weight[0]


class Anonymous:
    """The growth of memory that no file backs, sampled."""

    def __enter__(self):
        self.first = self.peak = self.now()
        self.over = False
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over = True
        self.thread.join()
        self.growth = self.peak - self.first

    def watch(self) -> None:
        while not self.over:
            self.peak = max(self.peak, self.now())
            time.sleep(0.005)

    @staticmethod
    def now() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def size_of(*folders: str) -> int:
    """Bytes of all files in folders."""
    files = (path for folder in folders for path in Path(folder).rglob("*") if path.is_file())
    return sum(path.stat().st_size for path in files)


def timed(function) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def contend(name: str, where: str, folder: str, blocks: int, tokens: int) -> dict[str, float]:
    """Load and run in this process; seconds and bytes."""
    inputs, told = torch.randn(1, tokens, WIDTH), {}
    # In a folder of their own, so that what is written can be weighed.
    offload = tempfile.tempdir = tempfile.mkdtemp(dir=folder)
    if name == "accelerate":
        from accelerate import init_empty_weights, load_checkpoint_and_dispatch

        with init_empty_weights():
            model = Model(blocks)
        places = {f"blocks.{n}": where for n in range(blocks)}
        if where == "disk":
            places["blocks.0"] = "cpu"  # all of it on disk is an error there
        load = lambda: load_checkpoint_and_dispatch(model, folder, device_map=places, offload_folder=offload)  # noqa: E731
    else:
        from accel_big_models import empty_weights
        from accel_big_models import load as load_into
        from accel_big_models.planning import plan_from_map

        with empty_weights():
            model = Model(blocks)
        places = plan_from_map(model, {"": "disk" if where == "read" else where})
        load = lambda: load_into(model, folder, places, mapped=where != "read")  # noqa: E731
    with torch.no_grad(), Anonymous() as memory:
        begun = time.process_time()
        told["load"] = timed(load)
        told["written"] = size_of(offload)
        told["first"] = timed(lambda: model(inputs))
        told["busy"] = time.process_time() - begun
        told["warm"] = statistics.median(timed(lambda: model(inputs)) for _ in range(TURNS))
    told["memory"] = memory.growth
    resident = Model(blocks)
    with torch.no_grad():
        for parameter in resident.parameters():
            parameter.uniform_(-0.01, 0.01)
        resident(inputs)
        turns = [(timed(lambda: model(inputs)), timed(lambda: resident(inputs))) for _ in range(TURNS)]
    told["over_resident"] = statistics.median(one / other for one, other in turns)
    if where == "read":
        told |= throttled(model, resident, inputs)
        told |= overlapped(folder, blocks)
    if where == "cpu":
        told["hooks"] = cost_of_hooks(name)
    return told


def cost_of_hooks(name: str) -> float:
    """Microseconds a module, over a plain model, where nothing is offloaded."""
    small = nn.Sequential(*(nn.Linear(8, 8) for _ in range(100)))
    plain, inputs = copy.deepcopy(small), torch.ones(1, 8)
    if name == "accelerate":
        from accelerate import dispatch_model

        dispatch_model(small, {"": "cpu"}, force_hooks=True)
    else:
        from accel_big_models import dispatch, plan_from_map

        dispatch(small, plan_from_map(small, {"": "cpu"}))
    with torch.no_grad():
        turns = [(timed(lambda: small(inputs)), timed(lambda: plain(inputs))) for _ in range(300)]
    return statistics.median(one - other for one, other in turns) * 1e6 / len(small)


def overlapped(folder: str, blocks: int) -> dict[str, float]:
    """Streaming where storage and computing both sleep: what the order of work costs."""
    from accel_big_models import load, plan_from_map

    compute, x, told = 0.1, torch.zeros(1), {}
    model = nn.Module()
    model.blocks = nn.ModuleList(Asleep(compute) for _ in range(blocks))
    model.forward = lambda x: functools.reduce(lambda value, block: block(value), model.blocks, x)
    resident = functools.partial(functools.reduce, lambda x, block: block(x), copy.deepcopy(model.blocks))
    path = Path(folder, "asleep", "model.safetensors")
    path.parent.mkdir(exist_ok=True)
    save_file(model.state_dict(), path)
    load(model, path, plan_from_map(model, {"": "disk"}), mapped=False)
    with torch.no_grad():
        for label, share in {"half": 0.5, "equal": 1.0}.items():
            with throttle(4 * (1 << 18) / (compute * share)):
                model(x)
                turns = [(timed(lambda: model(x)), timed(lambda: resident(x))) for _ in range(TURNS)]
            told[f"order_{label}"] = statistics.median(one / other for one, other in turns)
    return told


@contextmanager
def throttle(speed: float):
    """Let reads take as long as from storage of `speed` bytes a second."""
    from accel_big_models.files import OpenFile

    fine = OpenFile.read

    def slow(self, start, target) -> None:
        begun = time.perf_counter()
        fine(self, start, target)
        time.sleep(max(0.0, len(target) / speed - (time.perf_counter() - begun)))

    OpenFile.read = slow
    try:
        yield
    finally:
        OpenFile.read = fine


def throttled(model: nn.Module, resident: nn.Module, inputs: torch.Tensor) -> dict[str, float]:
    """Streaming from a disk that takes half or all of the time that a block computes."""
    told = {}
    with torch.no_grad():
        compute = statistics.median(timed(lambda: resident(inputs)) for _ in range(TURNS)) / len(
            resident.blocks
        )
        total = sum(parameter.nbytes for parameter in resident.parameters()) / len(resident.blocks)
        for label, share in {"half": 0.5, "equal": 1.0}.items():
            with throttle(total / (compute * share)):
                model(inputs)
                turns = [
                    (timed(lambda: model(inputs)), timed(lambda: resident(inputs))) for _ in range(TURNS)
                ]
            told[f"throttled_{label}"] = statistics.median(one / other for one, other in turns)
    return told


def write(folder: Path, blocks: int) -> None:
    homes = {}
    for number in range(blocks):
        part = {f"blocks.{number}.{name}": value for name, value in Block().state_dict().items()}
        save_file(part, folder / f"block-{number}.safetensors")
        homes |= dict.fromkeys(part, f"block-{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": homes}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=13)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--contend", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.contend:
        print(json.dumps(contend(*args.contend, args.blocks, args.tokens)))
        return
    contenders = [
        ("accelerate", "disk"),
        ("ours", "disk"),
        ("accelerate", "cpu"),
        ("ours", "cpu"),
        ("ours", "read"),
    ]
    seen: dict[tuple[str, str], list[dict[str, float]]] = {each: [] for each in contenders}
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), args.blocks)
        for number in range(args.rounds):
            for name, where in contenders[:: -1 if number % 2 else 1]:
                cache(Path(folder))
                command = [sys.executable, __file__, "--contend", name, where, folder]
                command += ["--blocks", str(args.blocks), "--tokens", str(args.tokens)]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                seen[name, where].append(json.loads(done.stdout.splitlines()[-1]))
                print(name, where, seen[name, where][-1], file=sys.stderr, flush=True)
    report(seen)


def cache(folder: Path) -> None:
    """Read the checkpoint: all contenders find it in the page cache, and none of it to be written."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb", buffering=0) as file:
            os.fsync(file.fileno())
            while file.read(1 << 24):
                pass


ROWS = (
    # what, key, contender of ours, bar; a key of two is their sum
    ("load, all on disk, s", "load", "disk", None),
    ("bytes written meanwhile, MB", "written", "disk", 0),
    ("load and first forward, CPU, s", "load+first", "cpu", None),
    ("the same, CPU seconds", "busy", "cpu", None),
    ("forward over resident, on disk, mapped", "over_resident", "disk", 1.1),
    ("the same, read ahead, files cached", "over_resident", "read", None),
    ("the same, reading takes half of computing", "throttled_half", "read", 1.25),
    ("the same, reading takes as long", "throttled_equal", "read", 1.5),
    ("order of work alone, reading takes half", "order_half", "read", None),
    ("order of work alone, reading takes as long", "order_equal", "read", None),
    ("extra memory while streaming, blocks", "memory", "read", 2.2),
    ("hooks where nothing is offloaded, µs a module", "hooks", "cpu", 0),
)
BARS = {"load": 0.05, "load+first": 0.5}
"""Of the ratio."""
SECONDS = (*BARS, "busy")
UNITS = {"written": 1e6, "memory": 4 * (8 * WIDTH * WIDTH + 7 * WIDTH)}


def report(seen: dict[tuple[str, str], list[dict[str, float]]]) -> None:
    def figure(name: str, where: str, key: str):
        keys = key.split("+")
        rounds = [sum(row[each] for each in keys) for row in seen[name, where] if keys[0] in row]
        typical = min if key in SECONDS else statistics.median
        beside = 0.0
        if key == "memory":  # what the same forward takes where all of the model is at hand
            beside = statistics.median(row[key] for row in seen[name, "cpu"])
        return (typical(rounds) - beside) / UNITS.get(key, 1) if rounds else None

    print("| what | Accelerate | accel-big-models | ratio | bar |\n|---|---|---|---|---|")
    for what, key, where, bar in ROWS:
        theirs = figure("accelerate", "disk" if where == "read" else where, key)
        ours = figure("ours", where, key)
        ratio = ours / theirs if key in SECONDS else None
        limit = f"{BARS[key]} ×" if key in BARS else bar
        cells = ["" if value is None else f"{value:.3g}" for value in (theirs, ours, ratio)]
        print(f"| {what} | {' | '.join(cells)} | {'' if limit is None else limit} |")


if __name__ == "__main__":
    main()

"""FSDP2 by a hand-written loop, by Accelerate and by us: a step, wrapping, memory, a checkpoint.

`python fsdp.py [--peers PYTHON] [--rounds N]` prints the tables, contenders taking turns. On the CPU two gloo
ranks train a small model; where there is a GPU, one rank trains a Llama-shaped model in bfloat16 instead,
compiled block by block: tokens a second, the share of the GPU's peak that matrix products use (MFU), memory.
On the CPU a second table has the wrapping alone, of models of 33 and of 800 blocks: by hand, one broadcast of
the weights of each block and torch's `fully_shard` of it.
`python fsdp.py NAME` is one rank of a contender, `python fsdp.py --mesh RxS NAME` one that only wraps.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from arena import Contender, free_port, serve

AUTOCAST = "by hand, autocast"
"""Norms and losses are float32's, as under Accelerate and under us; in bfloat16 only, so on a GPU."""
CONTENDERS = {"by hand": "here", AUTOCAST: "here", "accelerate": "peers", "accel-core": "here"}
CPU = {"width": 128, "layers": 4, "heads": 4, "vocabulary": 512, "length": 64, "batch": 2}
GPU = {"width": 2048, "layers": 16, "heads": 16, "vocabulary": 32_000, "length": 2048, "batch": 4}
WRAPPED = {"width": 64, "heads": 1, "vocabulary": 64}
BLOCKS = (33, 800)
MESHES = {"2 ranks": "2", "2 ranks, HSDP 2 x 1": "2x1", "4 ranks, HSDP 2 x 2": "2x2"}
WRAPPING_BAR = 1.3
"""How much longer wrapping may take than the same calls by hand."""
PEAK = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
"""Dense bfloat16 operations a second, as their maker states."""
UNITS = dict.fromkeys(("step", "work", "wrap", "save"), "ms")
UNITS |= {"memory": "MB", "tokens": "/s", "mfu": "%", "gpu": "GB"}


def build(sizes: dict[str, int]) -> Any:
    import torch
    from torch import nn
    from torch.nn import functional

    width, heads = sizes["width"], sizes["heads"]

    class Block(nn.Module):
        """Of Llama's shape: RMS norms, causal attention, a gated MLP of 8 / 3 the width."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)
            self.mix, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
            inner = 8 * width // 3 // 64 * 64
            self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
            self.down = nn.Linear(inner, width, bias=False)

        def forward(self, x: Any) -> Any:
            batch, length, _ = x.shape
            mixed = self.mix(self.first(x)).view(batch, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
            seen = functional.scaled_dot_product_attention(*mixed, is_causal=True)
            x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
            y = self.second(x)
            return x + self.down(functional.silu(self.gate(y)) * self.up(y))

    class Model(nn.Module):
        _no_split_modules = ["Block"]  # noqa: RUF012 - by this name libraries look for it

        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(sizes["vocabulary"], width)
            self.blocks = nn.ModuleList(Block() for _ in range(sizes["layers"]))
            self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, sizes["vocabulary"], bias=False)

        def forward(self, ids: Any) -> Any:
            x = self.tokens(ids)
            for block in self.blocks:
                x = block(x)
            return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), ids.flatten())

    torch.manual_seed(0)
    return Model()


class Loop:
    """One contender on one model: `step`, `save`; `wrapped`: the milliseconds that preparing took."""

    def __init__(self, name: str, sizes: dict[str, int], device: str) -> None:
        import torch

        self.sizes, self.device = sizes, torch.device(device)
        self.model = build(sizes).to(self.device)
        self.weights = sum(p.numel() for p in self.model.parameters())
        self.ids = torch.randint(sizes["vocabulary"], (sizes["batch"], sizes["length"]), device=self.device)
        self.folder = str(Path(tempfile.gettempdir(), "accel-benchmark-fsdp", name.replace(" ", "-")))
        if device != "cpu":
            for block in self.model.blocks:
                block.compile()
        started = time.perf_counter()
        makes = {"by hand": self.by_hand, AUTOCAST: self.by_hand_under_autocast}
        (makes | {"accelerate": self.accelerate, "accel-core": self.accel_core})[name]()
        self.wrapped = (time.perf_counter() - started) * 1e3
        if not all(hasattr(parameter, "device_mesh") for parameter in self.model.parameters()):
            raise RuntimeError(f"{name} did not shard the model")

    def optimizer_of(self) -> Any:
        import torch

        return torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=self.device.type != "cpu")

    def by_hand(self) -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed.checkpoint import save
        from torch.distributed.checkpoint.state_dict import get_state_dict
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        if not dist.is_initialized():
            dist.init_process_group()
        low = torch.bfloat16 if self.device.type != "cpu" else None
        policy = MixedPrecisionPolicy(param_dtype=low)
        for module in (*self.model.blocks, self.model):
            fully_shard(module, mp_policy=policy)
        optimizer = self.optimizer_of()

        def step() -> None:
            self.model(self.ids).backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        def write() -> None:
            weights, state = get_state_dict(self.model, optimizer)
            save({"model": weights, "optimizer": state}, checkpoint_id=self.folder)

        self.step, self.write = step, write

    def by_hand_under_autocast(self) -> None:
        import torch

        self.by_hand()
        self.model.forward = torch.autocast(self.device.type, torch.bfloat16)(self.model.forward)

    def accelerate(self) -> None:
        from accelerate import Accelerator, FullyShardedDataParallelPlugin

        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Block"],
            state_dict_type="SHARDED_STATE_DICT",
        )
        self._ours(Accelerator(fsdp_plugin=plugin, mixed_precision="bf16"))

    def accel_core(self) -> None:
        from accel_core import Accelerator
        from accel_fsdp import FullyShardedDataParallelPlugin

        plugin = FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap=["Block"])
        cpu = self.device.type == "cpu"
        self._ours(Accelerator(cpu=cpu, plugins=[plugin], mixed_precision="no" if cpu else "bf16"))

    def _ours(self, accelerator: Any) -> None:
        self.model, optimizer = accelerator.prepare(self.model, self.optimizer_of())

        def step() -> None:
            with accelerator.accumulate(self.model):
                accelerator.backward(self.model(self.ids))
                accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

        self.step, self.write = step, lambda: accelerator.save_state(self.folder)

    def worked(self, times: int) -> float:
        """Milliseconds of CPU time that one step takes of this process, whatever else the machine does."""
        started = time.process_time()
        for _ in range(times):
            self.step()
        return (time.process_time() - started) / times * 1e3

    def timed(self, call: Callable[[], None], times: int) -> float:
        """Milliseconds of one call, all of the device's work included."""
        import torch

        wait = (lambda: None) if self.device.type == "cpu" else torch.accelerator.synchronize
        wait()
        started = time.perf_counter()
        for _ in range(times):
            call()
        wait()
        return (time.perf_counter() - started) / times * 1e3


def give_back_memory() -> None:
    """Leave the memory of a GPU that no tensor has to the other contenders."""
    import torch

    if torch.accelerator.is_available():
        torch.get_device_module().empty_cache()


def contender(name: str) -> None:
    import torch

    on = torch.accelerator.current_accelerator()
    gpu = on is not None and int(os.environ.get("WORLD_SIZE", "1")) == 1
    if gpu:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ["MASTER_PORT"] = str(free_port())
    loop = Loop(name, GPU if gpu else CPU, "cuda" if gpu else "cpu")
    for _ in range(3):
        loop.step()
    give_back_memory()
    times = 10 if gpu else 20
    seen = [0.0]

    def tokens() -> float:
        loop.step()  # which takes the memory again that the others had meanwhile
        seen[0] = loop.sizes["batch"] * loop.sizes["length"] * 1e3 / loop.timed(loop.step, times)
        give_back_memory()
        return seen[0]

    def mfu() -> float:
        peak = next((rate for word, rate in PEAK.items() if word in torch.cuda.get_device_name()), None)
        sizes = loop.sizes
        attention = 6 * sizes["layers"] * sizes["width"] * sizes["length"]  # causal: half of 12
        return seen[0] * (6 * loop.weights + attention) / peak * 100 if peak else float("nan")

    def save() -> float:
        shutil.rmtree(loop.folder, ignore_errors=True)
        return loop.timed(loop.write, 1)

    serve(
        {
            "step": lambda: loop.timed(loop.step, times),
            "work": lambda: loop.worked(times),
            "wrap": lambda: loop.wrapped,
            "memory": lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "save": save,
            "tokens": tokens,
            "mfu": mfu,
            "gpu": lambda: torch.cuda.max_memory_allocated() / 2**30,
        }
    )


def wrapping(name: str, mesh: list[int]) -> None:
    """One rank of a contender that wraps a new model at each turn, for `BLOCKS` blocks."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from accel_core import Accelerator, ParallelismConfig

    sizes = {} if len(mesh) == 1 else {"dp_replicate": mesh[0], "dp_shard": mesh[1]}
    accelerator = Accelerator(cpu=True, strategy="fsdp", parallelism_config=ParallelismConfig(**sizes))
    names = ("replicate", "shard")[-len(mesh) :]
    device_mesh = init_device_mesh("cpu", tuple(mesh), mesh_dim_names=names)

    def by_hand(model: Any) -> None:
        for module in (*model.blocks, model):
            own = [p.detach() for p in module.parameters() if not hasattr(p, "device_mesh")]
            flat = torch.cat([p.flatten() for p in own])
            dist.broadcast(flat, 0)
            for p, part in zip(own, flat.split([p.numel() for p in own]), strict=True):
                p.copy_(part.view_as(p))
            fully_shard(module, mesh=device_mesh)

    def wrapped(blocks: int) -> float:
        model = build(WRAPPED | {"layers": blocks})
        if name != "by hand":
            accelerator.free_memory()  # lets the model of the turn before go
        dist.barrier()
        started = time.perf_counter()
        by_hand(model) if name == "by hand" else accelerator.prepare(model)
        dist.barrier()
        return (time.perf_counter() - started) * 1e3

    wrapped(2)
    serve({str(blocks): lambda blocks=blocks: wrapped(blocks) for blocks in BLOCKS})


def wrapping_table(count: int) -> str:
    """The wrapping of both contenders, in turns: medians, and the median ratio to the same calls by hand."""
    lines = ["| wrapping | by hand | accel-core | bar |", "|---|---|---|---|"]
    for where, mesh in MESHES.items():
        with ExitStack() as ends:
            both = [
                Contender(name, sys.executable, "fsdp.py", int(where[0]), "--mesh", mesh)
                for name in ("by hand", "accel-core")
            ]
            for each in both:
                ends.callback(each.end)
            for each in both:
                each.answers()
            for blocks in BLOCKS:
                turns = [[each.turn(str(blocks)) for each in both] for _ in range(count)]
                hand, ours = (list(figures) for figures in zip(*turns, strict=True))
                cells = f"{cell(hand, hand, 'ms')} | {cell(ours, hand, 'ms')}"
                lines.append(f"| {blocks} blocks, {where} | {cells} | {WRAPPING_BAR} x |")
    return "\n".join(lines)


def contest(names: Iterable[str], peers: str | None, ranks: int, cases: tuple[str, ...], count: int) -> str:
    """A table: contenders by figures, the medians of rounds, and the median ratio to the loop by hand."""
    pythons = {"here": sys.executable, "peers": peers}
    found: dict[str, dict[str, list[float]]] = {}
    with ExitStack() as ends:
        contenders = {}
        for name in names:
            if python := pythons[CONTENDERS[name]]:
                contenders[name] = Contender(name, python, "fsdp.py", ranks)
                ends.callback(contenders[name].end)
        for each in contenders.values():
            each.answers()
        for number in range(count + 1):
            for name, each in contenders.items():
                for case in cases:
                    figure = each.turn(case)
                    if number or case in ("wrap", "memory"):
                        found.setdefault(name, {}).setdefault(case, []).append(figure)
    lines = [f"| | {' | '.join(cases)} |", "|" + "---|" * (len(cases) + 1)]
    for name, figures in found.items():
        cells = [cell(figures[case], found["by hand"][case], UNITS[case]) for case in cases]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(mine: list[float], base: list[float], unit: str) -> str:
    ratio = statistics.median(one / other for one, other in zip(mine, base, strict=True))
    return f"{statistics.median(mine):.1f} {unit} ({ratio:.3f} ×)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contender", nargs="?", choices=CONTENDERS)
    parser.add_argument("--peers", metavar="PYTHON", help="interpreter that has accelerate")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mesh", help="of a contender that only wraps: ranks, or replicas x shards")
    args = parser.parse_args()
    if args.contender and args.mesh:
        wrapping(args.contender, [int(size) for size in args.mesh.split("x")])
        return
    if args.contender:
        contender(args.contender)
        return
    import torch

    if torch.accelerator.is_available():
        print("One GPU, a Llama-shaped model, bfloat16, compiled by blocks:\n")
        print(contest(CONTENDERS, args.peers, 1, ("tokens", "mfu", "gpu", "wrap"), args.rounds))
    else:
        print("Two gloo ranks, 1 million weights, float32:\n")
        # Accelerate has no FSDP there: asked for it, it trains with DDP.
        names, cases = ("by hand", "accel-core"), ("step", "work", "wrap", "memory", "save")
        print(contest(names, None, 2, cases, args.rounds))
        print(f"\nWrapping, weights synchronised:\n\n{wrapping_table(args.rounds)}")
    load = f", load {os.getloadavg()[0]:.1f}"
    print(f"\ntorch {torch.__version__}, {os.cpu_count()} CPUs{load}")


if __name__ == "__main__":
    main()

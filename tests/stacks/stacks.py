"""All stacks that a user can select and this machine can run, and a draw of some of them by a seed."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

from attrs import field, frozen
from stack_sizes import DIMS, options

BACKENDS = Path(__file__).parents[2] / "backends"
DEVICES = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl", "musa": "mccl", "mlu": "cncl", "sdaa": "tccl"}
DEVICES |= {"xpu": "xccl", "hpu": "hccl", "mps": "none"}
"""Device -> its communication backend. All but the CPU are simulated."""
STANDS_IN = ("cuda", "xpu", "mps")
"""Devices of torch's own, for which a module answers; the others have a stand-in for their library."""
STRATEGIES = {
    "single": ("single",),
    "dispatched": ("dispatched",),
    "ddp": ("ddp",),
    "fsdp": ("fsdp 1", "fsdp 2"),
    "deepspeed": ("zero 0", "zero 1", "zero 2", "zero 3"),
    "megatron": ("megatron",),
}
PRECISIONS = ("no", "bf16", "fp16", "fp8-torchao", "fp8-te")
EXTENSIONS = ("ema", "monitor", "replicas", "bitsandbytes")


@frozen(kw_only=True, order=True)
class Stack:
    """What a user writes: a device, a strategy, a precision, extensions, sizes, and the number of ranks."""

    device: str
    strategy: str
    precision: str
    dims: frozenset[str] = field(converter=frozenset)
    extensions: frozenset[str] = field(converter=frozenset)
    world: int

    def __str__(self) -> str:
        parts = [self.device, self.strategy, self.precision, *sorted(self.extensions)]
        return "+".join(parts).replace(" ", "") + "".join(f",{dim}2" for dim in sorted(self.dims)) + f"@{self.world}"

    @property
    def family(self) -> str:
        return {"zero": "deepspeed"}.get(self.strategy.split()[0], self.strategy.split()[0])

    @property
    def variables(self) -> dict[str, str]:
        """The stack as a user would set it in the environment."""
        found = dict(options(self.strategy, self.dims, self.world))
        named = [*found.pop("extensions", "").split(","), *sorted(self.extensions)]
        found["strategy"] = self.family
        found["mixed_precision"] = self.precision
        found["extensions"] = ",".join(filter(None, named))
        if self.family == "fsdp":
            found["fsdp.fsdp_version"] = self.strategy[-1]
        if self.family == "deepspeed" and "sp" not in self.dims:
            found["deepspeed.zero_stage"] = self.strategy[-1]
        if self.precision == "fp8-torchao":
            found["fp8_torchao.multiple_of"] = "1"
        if self.precision == "fp8-te":
            found["fp8_te.recipe"] = "current"
            found["fp8_te.pad_tokens"] = "true"
        for name in self.extensions & {"monitor", "replicas"}:
            found[f"{name}.every"] = "1"
        found = {path: text for path, text in found.items() if text}
        return {f"ACCEL__{path.replace('.', '__').upper()}": text for path, text in found.items()}

    @property
    def job(self) -> dict[str, Any]:
        """What a rank has to know besides."""
        model = "experts" if "ep" in self.dims else "gpt2" if self.family == "megatron" else "decoder"
        simulate = None if self.device == "cpu" else (
            self.device, DEVICES[self.device], f"stands_for_{self.device}" if self.device in STANDS_IN else None
        )
        path = [] if simulate is None else [str(BACKENDS / self.device / "tests" / "stand_in")]
        if self.precision == "fp8-te":
            path += [str(BACKENDS / "transformer-engine" / "tests" / "stand_in")]
        return {
            "device": self.device,
            "model": model,
            "sp": "sp" in self.dims and self.family == "deepspeed",
            "whole_windows": "pp" in self.dims or self.family == "megatron",
            "path": path,
            "cuda_on_cpu": self.family == "megatron",
            "simulate": simulate,
        }


def worlds(dims: frozenset[str]) -> tuple[int, ...]:
    least = max(1, 2 ** len(dims))
    return tuple(world for world in (1, 2, 4) if world >= least)


def drawn(seed: int) -> Iterator[Stack]:
    """Yield stacks without end."""
    chosen = random.Random(seed)
    sizes = [frozenset(some) for count in (0, 1, 2) for some in combinations(DIMS, count)]
    extras = [frozenset(some) for count in (0, 1, 2) for some in combinations(EXTENSIONS, count)]
    while True:
        dims = chosen.choice(sizes)
        yield Stack(
            device=chosen.choice(["cpu", chosen.choice([*DEVICES])]),
            strategy=chosen.choice(STRATEGIES[chosen.choice([*STRATEGIES])]),
            precision=chosen.choice(PRECISIONS),
            dims=dims,
            extensions=chosen.choice(extras),
            world=chosen.choice(worlds(dims)),
        )

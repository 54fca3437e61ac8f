"""All stacks that a user can select and that run on this machine, and a draw of them by a seed."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from datetime import datetime, timezone
from itertools import combinations
from typing import Any, Final

from attrs import field, frozen
from stack_sizes import DIMS, options

__all__ = ["DEVICES", "EXTENSIONS", "PRECISIONS", "SEED", "STRATEGIES", "Stack", "draw", "seed", "unable"]

SEED: Final = "ACCEL_STACKS_SEED"
"""Variable with the seed of the draw; unset: the date."""
DEVICES: Final = {
    "cuda": "nccl",
    "npu": "hccl",
    "musa": "mccl",
    "mlu": "cncl",
    "sdaa": "tccl",
    "xpu": "xccl",
    "hpu": "hccl",
    "mps": "none",
}
"""Simulated device -> its communication backend. Half of the draws are on the real CPU."""
STRATEGIES: Final = {
    "single": ("single",),
    "dispatched": ("dispatched",),
    "ddp": ("ddp",),
    "fsdp": ("fsdp 1", "fsdp 2"),
    "deepspeed": ("deepspeed 0", "deepspeed 1", "deepspeed 2", "deepspeed 3"),
    "megatron": ("megatron",),
}
"""Strategy -> its kinds: versions of FSDP, stages of ZeRO."""
PRECISIONS: Final = ("fp32", "bf16", "fp16", "fp8-torchao", "fp8-te")
EXTENSIONS: Final = ("bitsandbytes", "ema", "replicas")
"""Extensions besides `tp` and `cp`, which the sizes bring in, and `monitor`, which every run has.

`mirror` copies checkpoints, whatever wrote them; `ipex` is for Intel's own CPUs and GPUs.
"""
LARGEST: Final = 4
"""Ranks of a stack at most."""
SETTINGS: Final = {
    # The decoder's layers are smaller than a GPU's kernels take; the stand-in has no scales of earlier steps.
    "fp8-torchao": {"fp8_torchao.multiple_of": "1"},
    "fp8-te": {"fp8_te.recipe": "current"},
    "replicas": {"replicas.every": "1"},
}
"""Plugin -> options that show it on a small decoder."""


@frozen(kw_only=True)
class Stack:
    """A user's choice: a device, a kind of strategy, a precision, sizes, extensions, a number of ranks."""

    device: str
    kind: str
    precision: str
    dims: frozenset[str] = field(converter=frozenset)
    """Dimensions of size 2. Ranks that are left read other data."""
    extensions: frozenset[str] = field(converter=frozenset)
    world: int

    def __str__(self) -> str:
        words = [self.device, self.kind.replace(" ", ""), self.precision, *sorted(self.extensions)]
        return "+".join([*words, *(f"{dim}2" for dim in sorted(self.dims))]) + f"@{self.world}"

    @property
    def strategy(self) -> str:
        """The strategy, without its version or stage."""
        return self.kind.partition(" ")[0]

    @property
    def variables(self) -> dict[str, str]:
        """The stack as a user sets it in the environment."""
        found = {"strategy": self.strategy, "mixed_precision": self.precision}
        found |= options(self.kind, self.dims, self.world)
        if self.extensions:
            found["extensions"] = ",".join(sorted(self.extensions))
        for plugin in (self.precision, *self.extensions):
            found |= SETTINGS.get(plugin, {})
        return {f"ACCEL__{path.replace('.', '__').upper()}": text for path, text in found.items()}

    @property
    def facts(self) -> dict[str, Any]:
        """The stack for a report."""
        return {
            "device": self.device,
            "strategy": self.kind,
            "precision": self.precision,
            "sizes": sorted(self.dims),
            "extensions": sorted(self.extensions),
            "world": self.world,
        }


def unable(stack: Stack) -> str | None:
    """Return why no machine without the hardware can run the stack; None if this one can."""
    if stack.strategy == "megatron" and stack.precision == "fp8-te":
        return "the stand-in of Transformer Engine has no kernel of SGD"
    if stack.device == "cpu":
        return None
    reasons = {
        "DeepSpeed asks the vendor's library of each chip itself": stack.strategy == "deepspeed",
        "megatron-core calls torch.cuda by name": stack.strategy == "megatron",
        "version 1 of FSDP compares addresses, which simulated tensors do not have": stack.kind == "fsdp 1",
        "torch's attention over parts of sequences resizes tensors": "cp" in stack.dims,
        "the stand-in of Transformer Engine computes on the CPU": stack.precision == "fp8-te",
        "simulated tensors have no float8": stack.device == "cuda" and stack.precision == "fp8-torchao",
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def draw(seed: int) -> Iterator[Stack]:
    """Yield stacks that this machine can run, without end."""
    chosen = random.Random(seed)
    dims, extensions = ([*map(frozenset, _up_to_two(names))] for names in (DIMS, EXTENSIONS))
    while True:
        sizes = chosen.choice(dims)
        stack = Stack(
            device=chosen.choice(["cpu", chosen.choice([*DEVICES])]),
            kind=chosen.choice(STRATEGIES[chosen.choice([*STRATEGIES])]),
            precision=chosen.choice(PRECISIONS),
            dims=sizes,
            extensions=chosen.choice(extensions),
            world=chosen.choice([world for world in (1, 2, LARGEST) if world >= 2 ** len(sizes)]),
        )
        if unable(stack) is None:
            yield stack


def _up_to_two(names: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for count in range(3):
        yield from combinations(names, count)


def seed() -> int:
    """Return the seed of this run."""
    return int(os.environ.get(SEED) or f"{datetime.now(timezone.utc):%Y%m%d}")

"""Bytes that a model needs by dtype, for its weights and training, and a plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import torch
from attrs import frozen
from torch import nn
from torch.nn.parameter import is_lazy

from accel_big_models.blocks import blocks_of
from accel_big_models.planning import Memory, plan
from accel_big_models.plans import Plan
from accel_big_models.sizes import text_of
from accel_core import ConfigError

__all__ = ["Estimate", "Needs", "estimate"]

SIZES: Final = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0, "int4": 0.5}
"""dtype -> bytes of a floating-point weight that is kept in it."""
ADAM: Final = 4
"""Weights, gradients and two moments, each as large as the weights."""
TRAINED: Final = ("float32", "bfloat16")
"""dtypes in which weights take gradients."""


_TRAINING: Final = (
    "Training: weights, gradients and two moments in that dtype, without activations.\n"
    "Frozen weights have no gradients and no moments.\n"
    "Mixed precision keeps all of them in float32."
)


@frozen
class Needs:
    """Bytes with the floating-point weights in one dtype.

    training: with Adam, without activations; None where weights of that dtype take no gradients.
    """

    dtype: str
    weights: int
    largest: int
    training: int | None


@frozen
class Estimate:
    """Sizes of a model. Prints as a table or as JSON.

    parameters: their number, tied ones once. stored: dtype -> number of parameters that have it. blocks:
    their number. block: name of the largest. plan: of the model in `dtype`, or the reason why there is none.
    """

    kind: str
    parameters: int
    stored: Mapping[str, int]
    blocks: int
    block: str
    needs: tuple[Needs, ...]
    dtype: str | None
    plan: Plan | str

    def as_table(self, name: str) -> str:
        """Return the text that `accel estimate` prints."""
        stored = ", ".join(f"{count:,} in {dtype}" for dtype, count in self.stored.items())
        rows = [("dtype", "weights", "largest block", "training with Adam")]
        for each in self.needs:
            trained = "-" if each.training is None else text_of(each.training)
            rows.append((each.dtype, text_of(each.weights), text_of(each.largest), trained))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            f"{name}: {self.kind}, {self.parameters:,} parameters ({stored})",
            f"{self.blocks} blocks; the largest is {self.block or 'the model itself'}",
            "",
            *("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows),
            "",
            _TRAINING,
            f"Places, with weights in {self.dtype or 'their own dtypes'}:",
        ]
        return "\n".join([*lines, *self._places()])

    def _places(self) -> list[str]:
        if isinstance(self.plan, str):
            return [f"  {line}" for line in self.plan.splitlines()]
        lines = []
        for place, size in self.plan.used.items():
            room = self.plan.memory.get(place, math.inf)
            free = "" if math.isinf(room) else f" of {text_of(room)}"
            lines.append(f"  {place}: {text_of(size)}{free}")
        if self.plan.kept:
            lines.append(f"  {self.plan.device} keeps {text_of(self.plan.kept)} for blocks that come and go")
        return lines

    def as_json(self, name: str) -> dict[str, Any]:
        """Return the object that `accel estimate --json` prints. Sizes are bytes."""
        places = (
            {"refused": self.plan}
            if isinstance(self.plan, str)
            else {
                "used": self.plan.used,
                "memory": {
                    place: None if math.isinf(room) else room for place, room in self.plan.memory.items()
                },
                "kept_for_streaming": self.plan.kept,
                "device_map": self.plan.device_map,
            }
        )
        return {
            "model": name,
            "class": self.kind,
            "parameters": self.parameters,
            "stored": dict(self.stored),
            "blocks": self.blocks,
            "largest_block": self.block,
            "needs": {
                each.dtype: {"weights": each.weights, "largest_block": each.largest, "adam": each.training}
                for each in self.needs
            },
            "plan": {"dtype": self.dtype, **places},
        }


def estimate(model: nn.Module, memory: Memory | None = None, *, dtype: str | None = None) -> Estimate:
    """Measure a model, which may be on the meta device.

    Args:
        model: only shapes and dtypes are read.
        memory: place -> bytes, for the plan; see `plan`.
        dtype: of floating-point weights in the plan, None for their own.

    Raises:
        ConfigError: there is no such dtype, or a weight has no shape yet.
    """
    named = (*model.named_parameters(), *model.named_buffers())
    lazy = next((name for name, tensor in named if is_lazy(tensor)), None)
    if lazy is not None:
        raise ConfigError(
            f"{lazy} of the {type(model).__name__} has no shape before the first forward\n"
            "run one forward, or use a module with sizes, such as Linear in place of LazyLinear"
        )
    kind = None if dtype is None else getattr(torch, dtype, None)
    if dtype is not None and not isinstance(kind, torch.dtype):
        raise ConfigError(f"dtype {dtype!r}: torch has no such dtype\nwrite float32, bfloat16 or float16")
    blocks = blocks_of(model)
    counts = [_Counts.of(block.tensors.values()) for block in blocks]
    whole = _Counts.of([*model.parameters(), *model.buffers()])
    largest = max(range(len(blocks)), key=lambda number: counts[number].bytes(4.0), default=None)
    try:
        places: Plan | str = plan(model, memory, dtype=kind)
    except ConfigError as error:
        places = str(error)
    return Estimate(
        kind=type(model).__name__,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        stored=_stored(model),
        blocks=len(blocks),
        block="" if largest is None else blocks[largest].name,
        needs=tuple(_needs(name, size, whole, counts) for name, size in SIZES.items()),
        dtype=dtype,
        plan=places,
    )


def _stored(model: nn.Module) -> dict[str, int]:
    stored: dict[str, int] = {}
    for parameter in model.parameters():
        name = str(parameter.dtype).removeprefix("torch.")
        stored[name] = stored.get(name, 0) + parameter.numel()
    return stored


def _needs(dtype: str, size: float, whole: _Counts, blocks: list[_Counts]) -> Needs:
    weights = whole.bytes(size)
    training = weights + (ADAM - 1) * int(whole.trained * size)
    largest = max((counts.bytes(size) for counts in blocks), default=0)
    return Needs(dtype, weights, largest, training if dtype in TRAINED else None)


@frozen
class _Counts:
    """Floating-point elements of tensors, those that train, bytes of the rest."""

    floating: int
    trained: int
    other: int

    @classmethod
    def of(cls, tensors: Any) -> _Counts:
        different = {id(tensor): tensor for tensor in tensors}.values()
        floating = [tensor for tensor in different if tensor.is_floating_point()]
        return cls(
            floating=sum(tensor.numel() for tensor in floating),
            trained=sum(tensor.numel() for tensor in floating if tensor.requires_grad),
            other=sum(tensor.nbytes for tensor in different if not tensor.is_floating_point()),
        )

    def bytes(self, size: float) -> int:
        """Return the bytes with floating-point elements of that many bytes each."""
        return int(self.floating * size) + self.other

"""Which stacks are refused by name, and why. A stack that no rule refuses has to train."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch
from stack_sizes import brought_in, claims
from stack_space import Stack

from accel_core import Card, discover

__all__ = ["Refusal", "expected"]


class Refusal(NamedTuple):
    """Why a stack is refused."""

    reason: str
    parts: tuple[str, str]
    """The two parts of the stack that do not go together."""


def expected(stack: Stack) -> Refusal | None:
    """Return why the stack is refused; None if it has to train."""
    rules = (_by_cards, _by_worlds, _by_sizes, _by_kinds)
    return next((Refusal(*found) for rule in rules for found in rule(stack)), None)


@cache
def cards() -> dict[str, Card]:
    """Return name -> card of each plugin."""
    return {record.name: record.card for record in discover().records if record.card is not None}


def _by_cards(stack: Stack) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield the plugins that need a word which neither the device nor the strategy offers."""
    device, strategy = cards()["native" if stack.device == "cpu" else stack.device], cards()[stack.strategy]
    parts = brought_in(stack.kind, stack.dims) | {
        stack.strategy: stack.kind,
        stack.precision: stack.precision,
    }
    parts |= {name: name for name in sorted(stack.extensions)}
    for name, part in parts.items():
        for word in sorted(cards()[name].needs - device.offers - strategy.offers):
            of_device = any(word in card.offers for card in (cards()["native"], cards()["xla"]))
            yield f"{name} needs {word}", (part, stack.device if of_device else stack.kind)


def _by_worlds(stack: Stack) -> Iterator[tuple[str, tuple[str, str]]]:
    if stack.kind in ("single", "dispatched") and stack.world > 1:
        reason = "each rank would train a model of its own"
        yield from ((reason, (stack.kind, dim)) for dim in [*sorted(stack.dims), "several ranks"])


def _by_sizes(stack: Stack) -> Iterator[tuple[str, tuple[str, str]]]:
    for dim in sorted(stack.dims - {*brought_in(stack.kind, stack.dims).values()}):
        if dim not in claims(stack.strategy):
            yield f"no plugin of the stack divides ranks along {dim}", (stack.kind, dim)
    if {"sp", "cp"} <= stack.dims:
        yield "both split sequences", ("cp", "sp")
    if {"ep", "cp"} <= stack.dims:
        yield "expert and context parallelism are not served together", ("cp", "ep")


def _by_kinds(stack: Stack) -> Iterator[tuple[str, tuple[str, str]]]:
    for dim in sorted(stack.dims & {"ep", "pp", "tp"} if stack.kind == "fsdp 1" else ()):
        yield "version 1 stores weights flat, not as parts of layers", (stack.kind, dim)
    if stack.strategy == "deepspeed" and stack.precision == "fp16":
        yield from _by_half(stack)
    if stack.kind == "megatron" and "ep" in stack.dims:
        yield "only a model that megatron-core's code builds has experts there", ("megatron", "ep")
    if stack.kind == "megatron" and "cp" in stack.dims:
        yield "megatron-core divides the ranks by its own degrees alone", ("megatron", "cp")
    if stack.kind == "megatron" and stack.precision == "fp8-torchao":
        yield "megatron-core trains layers of its own", ("megatron", "fp8-torchao")
    if stack.precision == "fp8-te" and "tp" in stack.dims and stack.strategy != "megatron":
        yield "its layers compute no parts of weights that a plan has split", ("fp8-te", "tp")


def _by_half(stack: Stack) -> Iterator[tuple[str, tuple[str, str]]]:
    if stack.kind == "deepspeed 0":
        yield "stage 0 does not scale the loss", (stack.kind, "fp16")
    if not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        yield "DeepSpeed asks the processor for float16, and this one has none", (stack.strategy, "fp16")

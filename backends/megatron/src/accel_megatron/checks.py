"""Checks of worlds, models and optimizers, before anything is built."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from accel_core import has_state
from accel_megatron import adapters, stepping, unsplit

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from accel_core import World
    from accel_megatron.adapters.adapter import Adapter
    from accel_megatron.config import Sized

__all__ = ["of_model", "of_optimizers", "of_world"]


def of_world(config: Sized, world: World) -> Iterator[str]:
    """Yield the reasons why a world cannot be divided by these sizes, or why options do not go with them."""
    ranks = config.tp * config.pp
    if world.size % ranks:
        yield (
            f"megatron: parallelism.tp {config.tp} × parallelism.pp {config.pp} = {ranks} ranks per model,"
            f" which do not divide the world of {world.size}\n"
            f"start {-(-world.size // ranks) * ranks} processes, or lower a size"
        )
    elif (world.size // ranks) % config.ep:
        yield (
            f"megatron: parallelism.ep {config.ep} does not divide the {world.size // ranks} ranks that could"
            " hold experts\nlower it, or start more processes"
        )
    if config.sequence_parallelism and config.tp == 1:
        yield (
            "megatron.sequence_parallelism splits over the ranks of parallelism.tp, which is 1\n"
            "set parallelism.tp: 2 or more"
        )
    if config.num_layers_per_virtual_pipeline_stage is not None and config.pp == 1:
        yield "megatron.num_layers_per_virtual_pipeline_stage needs stages\nset parallelism.pp: 2 or more"
    if config.micro_batches < config.pp:
        yield (
            f"megatron.num_micro_batches is {config.num_micro_batches}, and parallelism.pp {config.pp}:"
            f" stages would idle in every step\nset num_micro_batches: {config.pp} or more"
        )


def of_model(config: Sized, model: nn.Module, *, is_half: bool) -> Iterator[str]:
    """Reasons why a model cannot be trained or split so.

    `is_half` says that the model computes in 16 bits.
    """
    for name, parameter in model.named_parameters():
        if parameter.dtype is torch.float64 and not is_half:
            yield (
                f"{name} is float64, and megatron-core steps in float32\nmake it float32, or use strategy ddp"
            )
            break
        if parameter.is_complex():
            yield (
                f"{name} is {parameter.dtype}, and megatron-core adds up gradients as real numbers\n"
                "make it two real ones, a buffer where it is not trained, or use strategy ddp"
            )
            break
    if hasattr(model, "chunks"):  # made by build_model
        return
    if config.custom_model_provider_function is not None:
        yield (
            "megatron.custom_model_provider_function makes the model, and this is another\n"
            "prepare what accel_megatron.build_model(accelerator) gives, or leave the function out"
        )
    reason = adapters.why_unsupported(model)
    if reason is None:
        adapter = adapters.adapter_of(model)
        yield from _of_heads(config, adapter)
        yield from _of_layers(config, adapter)
    elif not unsplit.serves(config):
        yield reason
    elif unserved := unsplit.unserved(config, model):
        yield unserved


def of_optimizers(config: Sized, optimizers: Sequence[Optimizer], device: torch.device) -> Iterator[str]:
    """Reasons why megatron-core cannot step in place of these optimizers."""
    for optimizer in optimizers:
        if reason := stepping.why_unsupported(optimizer, config, device):
            yield reason
        if has_state(optimizer):
            yield (
                f"the {type(optimizer).__name__} has state already, and megatron-core's optimizer begins with"
                " none\nprepare it before its first step, and bring its state back with"
                " accelerator.load_state"
            )


def _of_heads(config: Sized, adapter: Adapter) -> Iterator[str]:
    """Reasons why layers cannot be split by parallelism.tp."""
    tp = config.tp
    for count, what in (
        (adapter.groups * adapter.queries, "attention heads"),
        (adapter.groups, "key and value heads"),
    ):
        if count % tp:
            yield (
                f"megatron: the model has {count} {what}, which parallelism.tp {tp} does not divide\n"
                f"choose a size that divides {count}"
            )
    if config.sequence_parallelism and not adapter.splits_sequences:
        yield (
            "megatron: sequence_parallelism: megatron-core's BERT head has a norm that cannot follow it\n"
            "leave it out"
        )


def _of_layers(config: Sized, adapter: Adapter) -> Iterator[str]:
    """Reasons why the layers cannot be cut into stages."""
    pp, each = config.pp, config.num_layers_per_virtual_pipeline_stage
    if adapter.layers % (pp * (each or 1)):
        virtual = f" × num_layers_per_virtual_pipeline_stage {each}" if each else ""
        yield (
            f"megatron: the model has {adapter.layers} layers, which parallelism.pp {pp}{virtual} does not"
            " divide\nchoose sizes that divide the number of layers"
        )
    elif each and adapter.layers == pp * each:
        yield (
            f"megatron: {adapter.layers} layers in chunks of {each} are one chunk for each of {pp} ranks\n"
            "leave num_layers_per_virtual_pipeline_stage out, or lower it"
        )
    elif each and config.micro_batches % pp:
        yield (
            f"megatron: the interleaved schedule takes a multiple of parallelism.pp {pp} micro-batches, and"
            f" num_micro_batches is {config.micro_batches}\nmake it a multiple"
        )

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
    from accel_megatron.config import MegatronLMPlugin

__all__ = ["of_model", "of_optimizers", "of_world"]


def of_world(config: MegatronLMPlugin, world: World) -> Iterator[str]:
    """Reasons why a world cannot be divided by these degrees."""
    tp, pp, cp = config.tp_degree, config.pp_degree, config.context_parallel_size
    ranks = tp * pp * cp
    if world.size % ranks:
        yield (
            f"megatron: tp_degree {tp} × pp_degree {pp} × context_parallel_size {cp} = {ranks} ranks a"
            f" model, which do not divide the world of {world.size}\n"
            f"start {-(-world.size // ranks) * ranks} processes, or lower a degree"
        )
    elif (world.size // (ranks // cp)) % config.expert_model_parallel_size:
        yield (
            f"megatron: expert_model_parallel_size {config.expert_model_parallel_size} does not divide the"
            f" {world.size // (ranks // cp)} ranks that could hold experts\nlower it, or start more processes"
        )


def of_model(config: MegatronLMPlugin, model: nn.Module, *, is_half: bool) -> Iterator[str]:
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


def of_optimizers(
    config: MegatronLMPlugin, optimizers: Sequence[Optimizer], device: torch.device
) -> Iterator[str]:
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


def _of_heads(config: MegatronLMPlugin, adapter: Adapter) -> Iterator[str]:
    """Reasons why layers cannot be split by tp_degree."""
    tp = config.tp_degree
    for count, what in (
        (adapter.groups * adapter.queries, "attention heads"),
        (adapter.groups, "key and value heads"),
    ):
        if count % tp:
            yield (
                f"megatron: the model has {count} {what}, which tp_degree {tp} does not divide\n"
                f"choose a tp_degree that divides {count}"
            )
    if config.sequence_parallelism and not adapter.splits_sequences:
        yield (
            "megatron: sequence_parallelism: megatron-core's BERT head has a norm that cannot follow it\n"
            "leave it out"
        )


def _of_layers(config: MegatronLMPlugin, adapter: Adapter) -> Iterator[str]:
    """Reasons why the layers cannot be cut into stages."""
    pp, each = config.pp_degree, config.num_layers_per_virtual_pipeline_stage
    if adapter.layers % (pp * (each or 1)):
        virtual = f" × num_layers_per_virtual_pipeline_stage {each}" if each else ""
        yield (
            f"megatron: the model has {adapter.layers} layers, which pp_degree {pp}{virtual} does not divide"
            "\nchoose degrees that divide the number of layers"
        )
    elif each and adapter.layers == pp * each:
        yield (
            f"megatron: {adapter.layers} layers in chunks of {each} are one chunk for each of {pp} ranks\n"
            "leave num_layers_per_virtual_pipeline_stage out, or lower it"
        )
    elif each and config.micro_batches % pp:
        yield (
            f"megatron: the interleaved schedule takes a multiple of pp_degree {pp} micro-batches, and"
            f" num_micro_batches is {config.micro_batches}\nmake it a multiple"
        )

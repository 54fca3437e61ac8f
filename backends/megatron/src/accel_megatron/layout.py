"""Checks of layouts, before any group of ranks is made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accel_core import World
    from accel_megatron.adapters.adapter import Adapter
    from accel_megatron.config import MegatronLMPlugin

__all__ = ["of_model", "of_world"]


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


def of_model(config: MegatronLMPlugin, adapter: Adapter) -> Iterator[str]:
    """Reasons why a model cannot be split by these degrees."""
    tp, pp, each = config.tp_degree, config.pp_degree, config.num_layers_per_virtual_pipeline_stage
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

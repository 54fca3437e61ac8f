"""This rank's chunks of a model.

Built by megatron-core, filled from the user's own weights, wrapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from attrs import define, field
from torch import Tensor, nn

from accel_megatron import settings
from accel_megatron.library import part, quiet
from accel_megatron.shard_map import Piece

if TYPE_CHECKING:
    from accel_core import Run
    from accel_megatron.adapters.adapter import Adapter
    from accel_megatron.config import Sized

__all__ = ["Chunks", "build", "chunk_numbers", "empty", "fill", "first_ranks", "share_buffers", "wrap"]

Make = Callable[..., nn.Module]
T = TypeVar("T")


@define(eq=False)
class Chunks:
    """This rank's parts of a model.

    raw: the modules themselves. run: the modules that the schedule calls, wrapped for training.

    shard_map: parameter here -> its pieces of the user's model. scheduled: every backward is a backward of
    the schedule; else the user may call any number of them before a step.
    """

    config: Any
    raw: list[nn.Module]
    shard_map: dict[nn.Parameter, Sequence[Piece]]
    scheduled: bool = True
    run: list[Any] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.run = self.run or list(self.raw)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Of all chunks, each once."""
        return iter(self.shard_map)

    def bucket_groups(self) -> Iterator[Any]:
        """Yield the groups of gradients that megatron-core reduces at once."""
        for chunk in self.run:
            for kind in ("bucket_groups", "expert_parallel_bucket_groups"):
                yield from getattr(chunk, kind, ())

    def reduce_at_the_step(self) -> None:
        """Have no backward reduce gradients that the user adds to by others."""
        for group in () if self.scheduled else self.bucket_groups():
            group.is_last_microbatch = False


def chunk_numbers(config: Sized, layers: int) -> int | None:
    """Return the number of chunks per rank; None: one, and the plain schedule."""
    each = config.num_layers_per_virtual_pipeline_stage
    return None if each is None else layers // (config.pp * each)


def build(run: Run, plugin: Sized, adapter: Adapter) -> Chunks:
    """Return the chunks of this rank, their weights not yet the user's. Collective."""
    virtual = chunk_numbers(plugin, adapter.layers)
    config = settings.build(run, plugin, virtual, **adapter.settings())
    chunks = made(run, plugin, virtual, lambda **stage: adapter.chunk(config, **stage))
    with quiet():
        from megatron.core import parallel_state
    split = part(parallel_state.get_tensor_model_parallel_group())
    shard_map = {
        parameter: adapter.pieces(name, parameter, split)
        for chunk in chunks
        for name, parameter in global_names(chunk)
    }
    return Chunks(config, chunks, shard_map)


def made(run: Run, plugin: Sized, virtual: int | None, make: Make) -> list[nn.Module]:
    """Make each chunk of this rank with `make`, on the device."""
    with quiet():
        from megatron.core import parallel_state, tensor_parallel

        chunks: list[nn.Module] = []
        for stage in range(virtual) if virtual else [None]:
            ends = {
                "pre_process": parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
                "post_process": parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            }
            chunk = make(**ends, vp_stage=stage).to(run.device)
            chunk = (plugin.custom_prepare_model_function or (lambda same: same))(chunk)
            for parameter in chunk.parameters():
                tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
            chunks.append(chunk)
    return chunks


def global_names(chunk: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters, by names with the number that a layer has in the whole model."""
    return _renamed(chunk, chunk.named_parameters())


def global_modules(chunk: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules, by such names."""
    return _renamed(chunk, chunk.named_modules())


def _renamed(chunk: nn.Module, named: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
    renamed = {
        f"{name}.": f"{name.rpartition('.')[0]}.{module.layer_number - 1}."
        for name, module in chunk.named_modules()
        if name.rpartition(".")[0].endswith("layers")
        and isinstance(getattr(module, "layer_number", None), int)
    }
    for name, each in named:
        local = next((prefix for prefix in renamed if name.startswith(prefix)), None)
        yield name if local is None else renamed[local] + name.removeprefix(local), each


@torch.no_grad()
def fill(shards: Mapping[str, Any], named: Mapping[str, Tensor], run: Run) -> None:
    """Copy rank 0's weights into the leaves; a whole weight at a time. Collective.

    A model without weights (of the meta device) keeps the weights that megatron-core has made.
    """
    control = run.collectives("control")
    held = control.broadcast_object([name for name, each in named.items() if not each.is_meta])
    for name in held:
        mine = named[name]
        tensor = first_ranks(mine, run)
        for offset, view in shards[name].shards:
            view.copy_(tensor[tuple(slice(a, a + n) for a, n in zip(offset, view.shape, strict=True))])


@torch.no_grad()
def share_buffers(model: nn.Module, run: Run) -> None:
    """Rank 0's, on each rank. Collective."""
    for each in model.buffers() if run.world.size > 1 else ():
        each.copy_(first_ranks(each, run))


def first_ranks(tensor: Tensor, run: Run) -> Tensor:
    """Rank 0's `tensor`, on the device of the run. Collective.

    It travels as bytes, because no backend sends every dtype.
    """
    held = torch.empty_like(tensor, device=run.device) if tensor.is_meta else tensor.detach().to(run.device)
    held = held.contiguous()
    if run.world.size > 1:
        held = held.clone() if held.data_ptr() == tensor.data_ptr() else held
        run.collectives("world").broadcast(held.view(-1).view(torch.uint8))
    return held


def empty(model: nn.Module) -> None:
    """Give the weights of the user's model up.

    Their names, shapes and identity stay, over one NaN.
    """
    for parameter in model.parameters():
        if not parameter.is_meta:
            parameter.data = parameter.data.new_full((), torch.nan).expand(parameter.shape)


def wrap(chunks: Chunks, plugin: Sized) -> None:
    """Have gradients of the chunks reduced, and weights in 16 bits if the run asks for it."""
    with quiet():
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.transformer.module import Float16Module

        config = chunks.config
        inner = [Float16Module(config, raw) if config.bf16 or config.fp16 else raw for raw in chunks.raw]
        data_parallel = DistributedDataParallelConfig(**settings.data_parallel_settings(plugin))
        chunks.run = [
            DistributedDataParallel(config, data_parallel, each, disable_bucketing=number > 0)
            for number, each in enumerate(inner)
        ]
    chunks.reduce_at_the_step()
    if data_parallel.overlap_grad_reduce and chunks.scheduled:
        config.no_sync_func = _one_or_all([each.no_sync for each in chunks.run])
        if len(chunks.run) > 1:
            config.grad_sync_func = [each.start_grad_sync for each in chunks.run]


def _one_or_all(functions: list[Any]) -> Any:
    return functions[0] if len(functions) == 1 else functions

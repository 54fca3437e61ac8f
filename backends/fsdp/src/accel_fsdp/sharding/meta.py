"""First values of weights: from the meta device, from rank 0, on their device.

One group at a time, just before it is sharded: a rank never holds the whole weights of two groups.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._random import is_rng_supported_mesh

from accel_core import AccelError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from accel_fsdp.config import FullyShardedDataParallelPlugin
    from accel_fsdp.sharding.wrapping import Group

__all__ = ["init_context", "materialize", "move", "send_weights"]

PARCEL: Final = 2**26
"""Bytes of small tensors that are copied into one buffer to be sent."""


def init_context(config: FullyShardedDataParallelPlugin, *, first: bool) -> AbstractContextManager[Any]:
    """Return a context that builds models on the meta device, unless this rank loads."""
    loads = config.cpu_ram_efficient_loading and first
    return nullcontext() if loads else torch.device("meta")


def materialize(
    group: Group,
    config: FullyShardedDataParallelPlugin,
    mesh: DeviceMesh,
    replica_groups: Sequence[dist.ProcessGroup],
    device: torch.device,
) -> None:
    """Give the group's tensors storage on the device and first values.

    Collective unless `sync_module_states` is False.

    replica_groups: groups of ranks that split layers, and have all other weights in common.
    """
    waits = config.cpu_ram_efficient_loading and not _is_first(mesh)
    for module in group.modules:
        empty = [tensor for tensor in _own(module) if tensor.is_meta]
        for tensor in empty:
            _swap(tensor, torch.empty_like(tensor, device=device))
        if empty and not waits:
            _initialize(module, config, group)
    tensors = list(dict.fromkeys(tensor for module in group.modules for tensor in _own(module)))
    for tensor in tensors:
        move(tensor, device)
    if config.syncs:
        ranks = [mesh.get_group(dim) for dim in range(mesh.ndim)]
        send_weights([t.to_local() for t in tensors if isinstance(t, DTensor)], ranks)
        send_weights([t for t in tensors if not isinstance(t, DTensor)], [*ranks, *replica_groups])


def _is_first(mesh: DeviceMesh) -> bool:
    return not any(mesh.get_coordinate() or ())


@torch.no_grad()
def send_weights(tensors: Sequence[Tensor], groups: Iterable[dist.ProcessGroup]) -> None:
    """Overwrite the tensors with the first rank's, of each group in turn. Collective.

    Tensors travel together: a broadcast of its own for each costs more than its bytes in most models.
    """
    groups = [group for group in groups if group.size() > 1]
    for parcel in _parcels([tensor.detach() for tensor in tensors]) if groups else ():
        # NCCL takes no transposed tensor. As bytes: groups lack dtypes, gloo int16 and float8 for example.
        laid_out = [tensor.resolve_conj().resolve_neg().contiguous() for tensor in parcel]
        parts = [tensor.reshape(-1).view(torch.uint8) for tensor in laid_out]
        sent = torch.cat(parts) if len(parts) > 1 else parts[0]
        for group in groups:
            dist.broadcast(sent, group=group, group_src=0)
        if len(parts) > 1:
            for part, received in zip(parts, sent.split([part.numel() for part in parts]), strict=True):
                part.copy_(received)
        for tensor, copy in zip(parcel, laid_out, strict=True):
            if copy is not tensor:
                tensor.copy_(copy)


def _parcels(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the tensors in lists of at most PARCEL bytes: a whole model may be one group."""
    parcel: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if parcel and size + tensor.nbytes > PARCEL:
            yield parcel
            parcel, size = [], 0
        parcel.append(tensor)
        size += tensor.nbytes
    if parcel:
        yield parcel


def _own(module: nn.Module) -> list[Tensor]:
    return [t for table in (module._parameters, module._buffers) for t in table.values() if t is not None]


def move(tensor: Tensor, device: torch.device) -> None:
    """Move a tensor to a device, in place."""
    if tensor.device == device:
        return
    moved = tensor.data.to(device)
    # Subclasses hold tensors of their own, which `.data =` would leave on their old device.
    is_plain = type(moved).__torch_dispatch__ is Tensor.__torch_dispatch__
    if is_plain and torch._has_compatible_shallow_copy_type(tensor, moved):
        tensor.data = moved
    else:
        _swap(tensor, moved)


def _swap(tensor: Tensor, real: Tensor) -> None:
    # The same object goes on, so that ties and optimizers hold.
    if isinstance(tensor, nn.Parameter):
        real = nn.Parameter(real, requires_grad=tensor.requires_grad)
    torch.utils.swap_tensors(tensor, real)


def _initialize(module: nn.Module, config: FullyShardedDataParallelPlugin, group: Group) -> None:
    fill = config.param_init_fn or getattr(type(module), "reset_parameters", None)
    if fill is None:
        raise AccelError(
            f"{group.name or 'the model'}: a {type(module).__name__} was built on the meta device and has no"
            " reset_parameters, so nobody knows its first weights\n"
            "give fsdp.param_init_fn, or load them on rank 0 with fsdp.cpu_ram_efficient_loading: true"
        )
    if any(isinstance(tensor, DTensor) and _is_split(tensor) for tensor in _own(module)):
        _refuse_blind_draws(group)
    fill(module)


def _is_split(tensor: DTensor) -> bool:
    return any(placement.is_shard() for placement in tensor.placements)


def _refuse_blind_draws(group: Group) -> None:
    # torch knows which part of a split weight a rank draws if generators can be moved on; else each
    # rank would draw the same numbers for its part.
    mesh = next(p for p in group.own_parameters if isinstance(p, DTensor)).device_mesh
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not is_rng_supported_mesh(mesh):
            raise AccelError(
                f"{group.name or 'the model'} was built on the meta device and is split by tensor-parallel,"
                f" but torch cannot draw first weights of split layers on {mesh.device_type}\n"
                "build it outside model_init_context, or load it with fsdp.cpu_ram_efficient_loading: true"
            )

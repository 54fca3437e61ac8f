"""Views of DeepSpeed's flat tensors by parameter: the elements this rank steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, Final

import torch.distributed as dist
from attrs import frozen
from torch.optim import Optimizer

from accel_core import CheckpointError, Leaf, flat_range, full_leaf, leaf_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from accel_core import Unit

__all__ = ["Fragment", "fragments", "live_part", "nowhere", "shape_of", "unstepped"]


@frozen(eq=False)
class Fragment:
    """Elements start, start + 1, ... of a flattened parameter, which this rank steps.

    flat: the tensor that the optimizer inside steps, the fp32 master if there is one; it holds `numel`
    of the parameter's elements from `at` on. group: number of its param_group. copies: other ranks may
    hold the same.
    """

    name: str
    parameter: nn.Parameter
    start: int
    flat: Tensor
    at: int
    numel: int
    group: int
    copies: bool

    def of(self, tensor: Tensor) -> Leaf:
        """Return this part of `tensor`, which is laid out as `flat` is."""
        shape = shape_of(self.parameter)
        if tuple(tensor.shape) == shape and self.numel == tensor.numel():
            return full_leaf(tensor, replicated=self.copies)
        return flat_range(self.cut(tensor), shape, self.start, replicated=self.copies)

    def cut(self, tensor: Tensor) -> Tensor:
        """Return a flat view of these elements of `tensor`, laid out as `flat`."""
        return tensor.detach().view(-1)[self.at : self.at + self.numel]


Part = tuple["nn.Parameter", int, int, int]
"""(parameter, begin in the flat tensor, first element of the parameter, number of elements)."""
Laid = tuple[int, "Tensor", int, Iterable[Part]]
"""(group, flat tensor, number of ranks with other parts, its fragments)."""


def shape_of(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return the shape of the whole parameter, also while it is partitioned."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def live_part(fragment: Fragment) -> Tensor:
    """Return the elements of the fragment that forward computes with.

    A view of the 16-bit (or only) copy.
    """
    parameter = fragment.parameter
    if hasattr(parameter, "ds_tensor"):
        partition: Tensor = parameter.ds_tensor.detach()
        return partition.view(-1)[: fragment.numel]
    return parameter.detach().view(-1)[fragment.start : fragment.start + fragment.numel]


def fragments(unit: Unit) -> Iterator[Fragment]:
    """Yield the fragments that this rank steps, in the groups' order.

    A fragment may be empty.

    Raises:
        CheckpointError: state cannot be read from its place, or has an unknown layout.
    """
    names = {parameter: name for name, parameter in unit.named_parameters().items()}
    (engine,) = unit.wrapped
    for group, flat, partitions, parts in _layout(engine.optimizer):
        copies = partitions < dist.get_world_size()
        for parameter, at, start, numel in parts:
            place = (start, flat, at, numel) if numel > 0 else (0, flat, 0, 0)
            yield Fragment(names[parameter], parameter, *place, group, copies)


def nowhere(parameter: nn.Parameter) -> Leaf:
    """Return a parameter of this one's shape that other ranks have."""
    return Leaf(kind="like_param", global_shape=shape_of(parameter), shards=(), replicated=True)


def unstepped(parameter: nn.Parameter) -> Leaf:
    """Return a parameter that no optimizer steps."""
    partition = getattr(parameter, "ds_tensor", None)
    if partition is None:
        return leaf_of(parameter)
    _, _, start, numel = _partitioned(parameter, 0)
    ranks = dist.get_world_size(parameter.ds_process_group)  # type: ignore[attr-defined]
    data = partition.detach().view(-1)[: max(0, numel)]
    return flat_range(data, shape_of(parameter), start, replicated=ranks < dist.get_world_size())


def _layout(optimizer: Any) -> Iterator[Laid]:
    """By exact class: a subclass (ZenFlow, SuperOffload) has its state elsewhere."""
    name = type(optimizer).__name__
    if optimizer is None or name == "DeepSpeedZeRoOffload":  # an engine that trains nothing
        return iter(())
    if getattr(optimizer, "offloaded_states", None):
        raise _unreadable("state was moved by engine.offload_states", "call engine.reload_states() before")
    if name in _LAYOUTS:
        return _LAYOUTS[name](optimizer)
    if isinstance(optimizer, Optimizer) and not hasattr(optimizer, "optimizer"):
        return _each([group["params"] for group in optimizer.param_groups])
    raise _unreadable(f"{name} has a layout that is not known here", "use plain ZeRO")


def _each(masters: Sequence[Sequence[Tensor]], models: Sequence[Any] | None = None) -> Iterator[Laid]:
    """Each parameter for itself, whole on all ranks."""
    for group, (stepped, theirs) in enumerate(zip(masters, models or masters, strict=True)):
        for master, parameter in zip(stepped, theirs, strict=True):
            yield group, master, 1, [(parameter, 0, 0, parameter.numel())]


def _fused(optimizer: Any) -> Iterator[Laid]:
    """Return the elements of groups laid end to end, on all ranks."""
    pairs = zip(optimizer.fp32_groups_flat, optimizer.fp16_groups, strict=True)
    for group, (flat, parameters) in enumerate(pairs):
        yield group, flat, 1, _cut(parameters, _end_to_end(parameters), 0, flat.numel())


def _bf16(optimizer: Any) -> Iterator[Laid]:
    """Return the elements of groups laid end to end, cut by rank."""
    groups = zip(optimizer.bf16_groups, map(_end_to_end, optimizer.bf16_groups), strict=True)
    return _ranges(optimizer, groups, optimizer.fp32_groups_flat_partition)


def _stages_1_and_2(optimizer: Any) -> Iterator[Laid]:
    """Return the elements of groups laid end to end in their own order, with gaps."""
    orders, offsets = optimizer.round_robin_bit16_groups, optimizer.round_robin_bit16_offsets
    return _ranges(optimizer, zip(orders, offsets, strict=True), optimizer.single_partition_of_fp32_groups)


def _ranges(optimizer: Any, groups: Iterable[Any], flats: Sequence[Tensor]) -> Iterator[Laid]:
    for group, ((parameters, offsets), flat) in enumerate(zip(groups, flats, strict=True)):
        process_group = optimizer.real_dp_process_group[group]
        begin = dist.get_rank(process_group) * flat.numel()
        parts = _cut(parameters, offsets, begin, flat.numel())
        yield group, flat, dist.get_world_size(process_group), parts


def _stage_3(optimizer: Any) -> Iterator[Laid]:
    """Each parameter cut by rank; the cuts of a sub-group laid end to end."""
    for number, (parameters, flat) in enumerate(
        zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True)
    ):
        sizes = [parameter.ds_tensor.ds_numel for parameter in parameters]
        if flat.numel() != sum(sizes):
            raise _unreadable("optimizer state is on NVMe", "offload to the CPU")
        parts = [_partitioned(p, at) for p, at in zip(parameters, _starts(sizes), strict=True)]
        group = optimizer.sub_group_to_group_id[number]
        yield group, flat, optimizer.sub_group_partition_counts[number], parts


def _partitioned(parameter: Any, at: int) -> Part:
    partition = parameter.ds_tensor
    if partition.status.name != "AVAILABLE" or hasattr(partition, "ds_quant_scale"):
        where = "quantized" if hasattr(partition, "ds_quant_scale") else "on NVMe"
        raise _unreadable(f"parameters are {where}", "keep them in memory, in full precision")
    start = dist.get_rank(parameter.ds_process_group) * partition.ds_numel
    return parameter, at, start, min(partition.ds_numel, parameter.ds_numel - start)


def _cut(parameters: Sequence[Any], offsets: Sequence[int], begin: int, size: int) -> Iterator[Part]:
    """Parts, of parameters at these offsets, in `size` elements from `begin` on."""
    for parameter, offset in zip(parameters, offsets, strict=True):
        first, end = max(offset, begin), min(offset + parameter.numel(), begin + size)
        yield parameter, first - begin, first - offset, end - first


def _end_to_end(parameters: Sequence[Any]) -> list[int]:
    return _starts([parameter.numel() for parameter in parameters])


def _starts(sizes: Sequence[int]) -> list[int]:
    return list(accumulate(chain([0], sizes[:-1])))[: len(sizes)]


def _unreadable(what: str, remedy: str) -> CheckpointError:
    return CheckpointError(f"deepspeed: {what}, so its state cannot be saved or loaded\n{remedy}")


_LAYOUTS: Final[Mapping[str, Callable[[Any], Iterator[Laid]]]] = {
    "FP16_UnfusedOptimizer": lambda optimizer: _each(optimizer.fp32_groups, optimizer.fp16_groups),
    "FP16_Optimizer": _fused,
    "BF16_Optimizer": _bf16,
    "DeepSpeedZeroOptimizer": _stages_1_and_2,
    "DeepSpeedZeroOptimizer_Stage3": _stage_3,
}

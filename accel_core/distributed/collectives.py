"""Collectives over nested structures: as few as there are dtypes, and checked before they start.

On CPU groups each operation begins with one exchange of fixed size, in which ranks see that all bring
the like, and small tensors travel along (see `exchange`). Ranks that disagree all raise, with what
each one brought. On other devices they are compared in debug mode only (ACCEL_DEBUG=1 or
ACCELERATE_DEBUG_MODE=1).

All ranks must call. None in a structure stays None. Results carry no gradient, and lie on the run's
device. A world of one never communicates, but gets results of the same shapes. `run`: the live one,
if there is only one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from accel_core.distributed.exchange import Call, calling, live
from accel_core.distributed.nested import (
    leaves,
    rebuild,
    recursively_apply,
    slice_tensors,
)

if TYPE_CHECKING:
    from torch import nn

    from accel_core.contract.run import Run
    from accel_core.contract.world import Collectives
    from accel_core.distributed.packing import Plan

__all__ = [
    "average",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_for_metrics",
    "gather_object",
    "pad_across_processes",
    "reduce",
    "split_between_processes",
    "wait_for_everyone",
]

Reduction = Literal["sum", "mean", "min", "max", "none"]

_WIDER: Final = {
    **dict.fromkeys((torch.int16, torch.uint16), torch.int32),
    **dict.fromkeys((torch.uint32, torch.uint64), torch.int64),
    torch.complex32: torch.complex64,
}
"""What process groups do not reduce. Integers converted back wrap around as they would have."""


def gather(tensor: Any, *, run: Run | None = None) -> Any:
    """Each tensor (n, ...) of every reader, concatenated in reader order: (readers * n, ...).

    A 0-dim tensor counts as (1,). Shapes must be equal on all ranks; `pad_across_processes` makes
    them so.

    Raises:
        CollectiveError: structures, shapes or dtypes differ between ranks; it shows each rank's.
        TypeError: a leaf is no tensor.
        ValueError: the tensors are on several devices.
    """
    return _gather(tensor, live(run), "gather")


def _gather(tensor: Any, run: Run, operation: str, at: str = "") -> Any:
    with calling(run, run.topology.gather_dim, operation, tensor, at=at) as call:
        tensors, plan = call.tensors()
        if call.size == 1:
            return rebuild(tensor, [each.detach().reshape(each.shape or 1) for each in tensors])
        table, mine = call.exchange(plan, tensors)
        if table is None:
            table = call.collectives.all_gather(mine).view(call.size, -1)
        return rebuild(tensor, plan.rows(table))


def gather_object(object: Any, *, run: Run | None = None) -> Any:
    """Every reader's picklable objects, in reader order.

    Lists, tuples and tensors are concatenated, mappings of them key by key; anything else becomes a
    list. Tensors come on the CPU.

    Raises:
        CollectiveError: another rank calls something else, or cannot pickle its object.
    """
    return _gather_object(object, live(run), "gather_object")


def _gather_object(object: Any, run: Run, operation: str, at: str = "") -> Any:
    on_cpu = run.device.type == "cpu"  # elsewhere a tensor would arrive on its sender's device
    mine = object if on_cpu else recursively_apply(Tensor.cpu, object)
    with calling(run, run.topology.gather_dim, operation, object, objects=True, at=at) as call:
        return _join_objects(call.all_objects(mine))


def gather_for_metrics(input_data: Any, use_gather_object: bool = False, *, run: Run | None = None) -> Any:
    """Gather what a batch gave (predictions, labels, ...), without the samples that pad its round.

    What holds something else than tensors, or is asked to, is gathered as objects: a list of a
    sample's object each. The padding is that of the innermost
    loader being iterated.

    Raises:
        CollectiveError: as `gather`; also if ranks are not in the same batch of the same epoch.
    """
    run = live(run)
    as_objects = use_gather_object or not _all_tensors(input_data)
    loader = run.active_loaders[-1] if run.active_loaders else None
    collect = _gather_object if as_objects else _gather
    gathered = collect(input_data, run, "gather_for_metrics", "" if loader is None else loader.place)
    remainder = -1 if loader is None else loader.remainder
    if remainder < 0:
        return gathered
    if as_objects:
        return _cut_objects(gathered, remainder)
    return slice_tensors(gathered, slice(remainder))


def broadcast(tensor: Any, from_process: int = 0, *, run: Run | None = None) -> Any:
    """Overwrite each tensor, in place, with that of rank `from_process`. Returns the structure.

    Raises:
        CollectiveError: structures, shapes or dtypes differ between ranks; it shows each rank's.
        TypeError: a leaf is no tensor.
        ValueError: there is no such rank, or the tensors are on several devices.
    """
    with calling(live(run), "world", f"broadcast from {from_process}", tensor) as call:
        call.check_rank(from_process)
        tensors, plan = call.tensors()
        if call.size == 1:
            return tensor
        table, mine = call.exchange(plan, tensors)
        sent = call.collectives.broadcast(mine, from_process) if table is None else table[from_process]
        originals, _ = leaves(tensor, "broadcast")
        for original, piece in zip(originals, plan.unflatten(plan.split(sent)), strict=True):
            original.copy_(piece)
        return tensor


def broadcast_object_list(
    object_list: list[Any], from_process: int = 0, *, run: Run | None = None
) -> list[Any]:
    """Replace the list's items, in place, by those of rank `from_process`. Returns the list.

    Only that rank's items must be picklable, and the others' may be fewer or more.

    Raises:
        CollectiveError: another rank calls something else, or `from_process` cannot pickle its items.
        ValueError: there is no such rank.
    """
    operation = f"broadcast_object_list from {from_process}"
    with calling(live(run), "world", operation, object_list, objects=True) as call:
        call.check_rank(from_process)
        object_list[:] = call.one_object(object_list, from_process)
        return object_list


def reduce(tensor: Any, reduction: Reduction = "mean", scale: float = 1.0, *, run: Run | None = None) -> Any:
    """Each tensor reduced over the ranks that share a loss, times `scale`. Shapes must be equal.

    `sum`, `mean`, `min`, `max`, or `none`, which gives `tensor` back as it is, not scaled. Booleans are
    counted by `sum`; floats of 8 and 16 bits are reduced in float32 and rounded once.

    Raises:
        CollectiveError: structures, shapes or dtypes differ between ranks; it shows each rank's.
        TypeError: a leaf is no tensor; `mean` of integers, `min` or `max` of complex ones.
        ValueError: an unknown reduction; the tensors are on several devices.
    """
    run = live(run)
    if reduction not in get_args(Reduction):
        raise ValueError(f"reduce: {reduction!r} is none of {', '.join(get_args(Reduction))}")
    if reduction == "none":
        return tensor
    with calling(run, run.topology.loss_dim, f"reduce ({reduction})", tensor) as call:
        wired, plan = call.tensors(lambda each: _wire(each, reduction))
        if call.size > 1:
            wired = _reduced(call, plan, wired, reduction)
        originals, _ = leaves(tensor, "reduce")
        counted = {torch.bool} if reduction == "sum" else set()
        results = [
            each if of.dtype in counted else each.to(of.dtype)
            for each, of in zip(wired, originals, strict=True)
        ]
        return rebuild(tensor, results if scale == 1.0 else [each * scale for each in results])


def pad_across_processes(
    tensor: Any, dim: int = 0, pad_index: Any = 0, pad_first: bool = False, *, run: Run | None = None
) -> Any:
    """Each tensor padded along `dim` with `pad_index` to the longest of all readers.

    pad_first: pad at the start. Tensors without that dimension stay as they are.

    Raises:
        CollectiveError: the structures differ between ranks; it shows each rank's.
        TypeError: a leaf is no tensor.
    """
    run = live(run)
    with calling(run, run.topology.gather_dim, "pad_across_processes", tensor, objects=True) as call:
        with call.local():
            tensors, structure = leaves(tensor, "pad_across_processes")
        here = [each.shape[dim] if -each.ndim <= dim < each.ndim else -1 for each in tensors]
        ndims = tuple([each.ndim for each in tensors])
        longest = map(max, zip(*call.all_objects(here, structure, ndims), strict=True))
        missing = [length - mine for mine, length in zip(here, longest, strict=True)]
        sides = [(less, 0) if pad_first else (0, less) for less in missing]
        padded = [
            pad(each, [0, 0] * (each.ndim - 1 - dim % each.ndim) + [*side], value=pad_index)
            if any(side)
            else each
            for each, side in zip(tensors, sides, strict=True)
        ]
        return rebuild(tensor, padded)


def wait_for_everyone(*, run: Run | None = None) -> None:
    """Return once every rank is here.

    Raises:
        CollectiveError: another rank calls something else, or does not come in time.
    """
    with calling(live(run), "world", "wait_for_everyone", None, objects=True) as call:
        call.all_objects(None)


@contextmanager
def split_between_processes(
    inputs: Any, apply_padding: bool = False, *, run: Run | None = None
) -> Iterator[Any]:
    """This reader's contiguous part of a list, tuple, tensor or dict of them; the first get one more.

    apply_padding: repeat the last item so that all readers have equally many.

    Raises:
        ValueError: the values of a dict differ in length.
    """
    topology = live(run).topology
    if isinstance(inputs, dict) and len({len(value) for value in inputs.values()}) > 1:
        raise ValueError("split_between_processes: all values of the dict must have the same length")
    if topology.readers == 1:
        yield inputs
        return
    length = len(next(iter(inputs.values()), ())) if isinstance(inputs, dict) else len(inputs)
    share, extra = divmod(length, topology.readers)
    start = topology.reader * share + min(topology.reader, extra)
    stop = start + share + (topology.reader < extra)
    missing = share + (extra > 0) - (stop - start) if apply_padding and length else 0
    yield _part(inputs, start, stop, missing)


# -- pieces ----------------------------------------------------------------------------------------


def _all_tensors(data: Any) -> bool:
    try:
        leaves(data, "gather")
    except TypeError:
        return False
    return True


def _reduced(call: Call, plan: Plan, tensors: Sequence[Tensor], reduction: Reduction) -> list[Tensor]:
    table, mine = call.exchange(plan, tensors)
    if table is None:
        return plan.unflatten([call.collectives.all_reduce(each, reduction) for each in plan.split(mine)])
    ranks = plan.split(table)
    if reduction in ("min", "max"):
        return plan.unflatten([each.amin(0) if reduction == "min" else each.amax(0) for each in ranks])
    sums = [each.sum(0, dtype=each.dtype) for each in ranks]
    return plan.unflatten([each / call.size for each in sums] if reduction == "mean" else sums)


def _wire(tensor: Tensor, reduction: Reduction) -> Tensor:
    """In a dtype that can be reduced."""
    tensor, dtype = tensor.detach(), tensor.dtype
    inexact = dtype.is_floating_point or dtype.is_complex
    unordered = dtype.is_complex or dtype is torch.uint64
    if (reduction == "mean" and not inexact) or (reduction in ("min", "max") and unordered):
        raise TypeError(f"reduce: no {reduction} of {dtype}\nuse reduction='sum', or convert, as by .float()")
    if dtype is torch.bool:
        return tensor.to(torch.int64 if reduction == "sum" else torch.uint8)
    return (
        tensor.float()
        if dtype.is_floating_point and dtype.itemsize < 4
        else tensor.to(_WIDER.get(dtype, dtype))
    )


def _part(value: Any, start: int, stop: int, missing: int) -> Any:
    if isinstance(value, dict):
        return {key: _part(item, start, stop, missing) for key, item in value.items()}
    if hasattr(value, "select") and not isinstance(value, Tensor):  # tables, which are not sliced
        return value.select([*range(start, stop), *[len(value) - 1] * missing])
    if not isinstance(value, list | tuple | Tensor):
        return value
    part = value[start:stop]
    if missing and isinstance(value, Tensor):
        return torch.cat([part, value[-1:].expand(missing, *value.shape[1:])])  # type: ignore[list-item]
    return part + type(value)([value[-1]]) * missing if missing else part  # type: ignore[operator]


def _join_objects(every: list[Any]) -> Any:
    first = every[0]
    if isinstance(first, dict):
        return {key: _join_objects([each[key] for each in every]) for key in first}
    if isinstance(first, Tensor) and first.ndim:
        return torch.cat(every)
    if isinstance(first, list | tuple):
        return [item for each in every for item in each]
    return every


def _cut_objects(gathered: Any, length: int) -> Any:
    if isinstance(gathered, dict):
        return {key: _cut_objects(value, length) for key, value in gathered.items()}
    return gathered[:length]


BUCKET_BYTES: Final = 256 * 2**20
"""Weights are averaged in copies of about this size: a whole copy might not fit beside the model."""


def average(parameters: Iterable[nn.Parameter], group: Collectives) -> None:
    """The mean over the group, of those that train: one all_reduce for each bucket of a dtype and device."""
    kinds: dict[Any, list[torch.Tensor]] = {}
    filled: Counter[Any] = Counter()
    for parameter in parameters:
        if parameter.requires_grad:
            kind = parameter.dtype, parameter.device
            kinds.setdefault((*kind, filled[kind] // BUCKET_BYTES), []).append(parameter.detach())
            filled[kind] += parameter.nbytes
    for tensors in kinds.values():
        flat = group.all_reduce(torch.cat([tensor.flatten() for tensor in tensors]), "mean")
        parts = flat.split([tensor.numel() for tensor in tensors])
        torch._foreach_copy_(
            tensors, [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]
        )

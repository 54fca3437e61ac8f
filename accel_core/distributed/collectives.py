"""Collectives over nested structures.

Tensors of one dtype travel together. All ranks must call. If ranks disagree, all of them raise an error that
shows the input of each rank: always on CPU groups, in debug mode on other groups (see `exchange`). None in a
structure stays None. Results are on the run's device, and carry a gradient only if `gather` or `reduce` is
called with `gradients=True`. A world of one never communicates, but gets results of the same shapes.

Readers are the ranks that read data of their own: ranks that share their data (tensor or pipeline parallel)
count as one reader. `run` defaults to the only live run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from accel_core.contract.arguments import quoted
from accel_core.contract.run import current
from accel_core.distributed.exchange import CollectiveCall, collective_call
from accel_core.distributed.gradients import with_gradient
from accel_core.distributed.nested import leaves, rebuild, recursively_apply, slice_tensors

if TYPE_CHECKING:
    from accel_core.contract.run import Run
    from accel_core.contract.world import Collectives
    from accel_core.distributed.packing import Plan

__all__ = [
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
"""Dtypes that process groups do not reduce -> a wider dtype in which they are reduced.

Integers that are converted back wrap around, as a sum in their own dtype would.
"""


def gather(tensor: Any, *, gradients: bool = False, every_rank: bool = False, run: Run | None = None) -> Any:
    """Concatenate each tensor (n, ...) of every reader, in reader order: (readers * n, ...).

    A 0-dim tensor counts as (1,). Shapes must be equal on all ranks; `pad_across_processes` makes them
    equal.

    Args:
        tensor: a nested structure of tensors.
        gradients: the result carries the gradient, for losses over the samples of all readers. A rank gets
            the sum of the gradients that all readers have for its part: after the strategy's average, the
            gradient of the mean of their losses. Backward is then collective.
        every_rank: gather from every rank, also from ranks that share their data; not with `gradients`.
        run: the only live run by default.

    Raises:
        CollectiveError: structures, shapes or dtypes differ between ranks; the message lists them by rank.
        TypeError: a leaf is not a tensor; `gather_for_metrics` and `gather_object` take other objects.
    """
    run = run or current()
    if every_rank and gradients:
        raise ValueError("gather: gradients=True is for readers\nleave out every_rank")
    gathered, inputs = _gather(tensor, run, "gather", dim="world" if every_rank else None)
    return with_gradient("gather", gathered, inputs, partial(_own_parts, run) if gradients else None)


def _gather(
    tensor: Any, run: Run, operation: str, at: str = "", dim: str | None = None
) -> tuple[Any, Sequence[Tensor]]:
    """Return the gathered structure, and this rank's tensors."""
    with collective_call(run, dim or run.topology.gather_dim, operation, tensor, at=at) as call:
        tensors, plan = call.tensors()
        if call.size == 1:
            rows = [leaf.detach().reshape(leaf.shape or 1) for leaf in tensors]
            return rebuild(tensor, rows), call.passed
        table = call.exchange(plan, tensors)
        if table is None:
            sent = call.packed(plan, tensors, shares=True)
            table = call.group.all_gather(sent).view(call.size, -1)
        return rebuild(tensor, plan.rows(table)), call.passed


def _own_parts(run: Run, gradients: Sequence[Tensor]) -> list[Tensor]:
    """Sum the gradients of gathered tensors over readers, and return this reader's parts of the sums."""
    dim = run.topology.gather_dim
    group = run.collectives(dim)
    sums = _reduce(gradients, run, dim, "sum", gradients=True)
    return [each.tensor_split(group.size)[group.rank] for each in sums]


def gather_object(object: Any, *, every_rank: bool = False, run: Run | None = None) -> Any:
    """Return every reader's picklable objects, in reader order; or every rank's.

    Lists and tensors are concatenated. Mappings with equal keys are joined key by key; named tuples, and
    tuples of lists, mappings or tensors, item by item. Other tuples are concatenated into a list, and all
    other objects become a list with one object per reader. Tensors arrive on the CPU.

    Raises:
        CollectiveError: another rank calls something else.
    """
    return _gather_object(object, run or current(), "gather_object", dim="world" if every_rank else None)


def _gather_object(
    object: Any,
    run: Run,
    operation: str,
    at: str = "",
    real_readers: int | None = None,
    dim: str | None = None,
) -> Any:
    # A tensor that is pickled on a device would arrive on its sender's device.
    sent = object if run.device.type == "cpu" else recursively_apply(Tensor.cpu, object)
    over = dim or run.topology.gather_dim
    with collective_call(run, over, operation, object, objects=True, at=at) as call:
        return _join_objects(call.all_objects(sent)[:real_readers])


def gather_for_metrics(input_data: Any, use_gather_object: bool = False, *, run: Run | None = None) -> Any:
    """Gather the results of a batch, without the results of samples that only padded the batch.

    Call `gather_for_metrics` once per batch of the innermost loader that is being iterated. Data that hold
    other objects than tensors are gathered as objects, see `gather_object`.

    Args:
        input_data: a structure of tensors, or a sequence of objects.
        use_gather_object: gather tensors as objects too.
        run: the only live run by default.

    Raises:
        CollectiveError: as `gather`; also if ranks are not in the same batch of the same epoch.
    """
    run = run or current()
    as_objects = use_gather_object or not _all_tensors(input_data)
    loader = run.active_loaders[-1] if run.active_loaders else None
    place, remainder = ("", -1) if loader is None else (loader.place, loader.remainder)
    real_readers = None if loader is None or loader.real_readers < 0 else loader.real_readers
    if as_objects:
        gathered = _gather_object(input_data, run, "gather_for_metrics", place, real_readers)
        return gathered if remainder < 0 or real_readers else _cut_objects(gathered, remainder)
    gathered, _ = _gather(input_data, run, "gather_for_metrics", place)
    if real_readers:
        readers = run.topology.readers
        return recursively_apply(lambda rows: rows[: len(rows) // readers * real_readers], gathered)
    return gathered if remainder < 0 else slice_tensors(gathered, slice(remainder))


def broadcast(tensor: Any, from_process: int = 0, *, run: Run | None = None) -> Any:
    """Overwrite each tensor, in place, with the tensor of rank `from_process`; return the structure.

    Raises:
        CollectiveError: structures, shapes or dtypes differ between ranks; the message lists them by rank.
        TypeError: a leaf is not a tensor.
    """
    with collective_call(run or current(), "world", f"broadcast from {from_process}", tensor) as call:
        tensors, plan = call.tensors()
        if call.size == 1:
            return tensor
        table = call.exchange(plan, tensors)
        if table is None:
            sent = call.group.broadcast(call.packed(plan, tensors), from_process)
        else:
            sent = table[from_process]
        # torch changes tensors of inference mode in that mode only.
        mode = torch.inference_mode if any(each.is_inference() for each in call.passed) else nullcontext
        with mode():
            for original, piece in zip(call.passed, plan.unflatten(plan.split(sent)), strict=True):
                original.copy_(piece)
        return tensor


def broadcast_object_list(
    object_list: list[Any], from_process: int = 0, *, run: Run | None = None
) -> list[Any]:
    """Replace the list's items, in place, with the items of rank `from_process`; return the list.

    Only the items of rank `from_process` must be picklable. Lists of other ranks may have any length.

    Raises:
        CollectiveError: another rank calls something else.
    """
    operation = f"broadcast_object_list from {from_process}"
    with collective_call(run or current(), "world", operation, object_list, objects=True) as call:
        object_list[:] = call.one_object(object_list, from_process)
        return object_list


def reduce(
    tensor: Any,
    reduction: Reduction = "mean",
    scale: float = 1.0,
    *,
    gradients: bool = False,
    run: Run | None = None,
) -> Any:
    """Reduce each tensor over the ranks that have a loss of their own.

    Shapes must be equal on all ranks; results have the same shapes. The input tensors are not changed. `sum`
    counts booleans; floats of 8 and 16 bits are reduced in float32 and rounded once.

    Args:
        tensor: a nested structure of tensors.
        reduction: "sum", "mean", "min", "max"; or "none", which returns `tensor` as it is, not scaled.
        scale: multiplies the result.
        gradients: a sum or mean carries the gradient, as in `gather`.
        run: the only live run by default.

    Raises:
        CollectiveError: structures, shapes or dtypes differ between ranks; the message lists them by rank.
        TypeError: a leaf is not a tensor; `mean` of integers, `min` or `max` of complex numbers.
        ValueError: an unknown reduction, or gradients of "min" and "max".
    """
    run = run or current()
    if reduction not in get_args(Reduction):
        known = ", ".join(get_args(Reduction))
        raise ValueError(f"reduction must be one of {known}, got {quoted(reduction)}")
    if reduction == "none":
        return tensor
    if gradients and reduction not in ("sum", "mean"):
        raise ValueError(f"reduce: a sum or mean carries gradients, not {reduction!r}; leave gradients out")
    return _reduce(tensor, run, run.topology.loss_dim, reduction, scale, gradients=gradients)


def _reduce(
    tensor: Any, run: Run, dim: str, reduction: Reduction, scale: float = 1.0, *, gradients: bool
) -> Any:
    with collective_call(run, dim, f"reduce ({reduction})", tensor) as call:
        reduced, plan = call.tensors(lambda leaf: _reducible(leaf, reduction))
        if call.size > 1:
            reduced = _reduced(call, plan, reduced, reduction)
        counted = {torch.bool} if reduction == "sum" else set()
        results = [
            result if original.dtype in counted else result.to(original.dtype)
            for result, original in zip(reduced, call.passed, strict=True)
        ]
        reduced = rebuild(tensor, results if scale == 1.0 else [result * scale for result in results])
    again = partial(_reduce, run=run, dim=dim, reduction=reduction, scale=scale, gradients=True)
    return with_gradient("reduce", reduced, call.passed, again if gradients else None)


def pad_across_processes(
    tensor: Any, dim: int = 0, pad_index: Any = 0, pad_first: bool = False, *, run: Run | None = None
) -> Any:
    """Pad each tensor along `dim` to the longest of all readers.

    Args:
        tensor: a nested structure of tensors; tensors without dimension `dim` stay as they are.
        dim: the dimension in which lengths may differ.
        pad_index: the value to pad with.
        pad_first: pad at the start instead of the end.
        run: the only live run by default.

    Raises:
        CollectiveError: the structures differ between ranks; the message lists them by rank.
        TypeError: a leaf is not a tensor.
    """
    run = run or current()
    name = "pad_across_processes"
    with collective_call(run, run.topology.gather_dim, name, tensor, objects=True) as call:
        tensors, structure = leaves(tensor, name)
        lengths = [leaf.shape[dim] if -leaf.ndim <= dim < leaf.ndim else -1 for leaf in tensors]
        of_ranks = call.all_objects(lengths, structure, tuple([leaf.ndim for leaf in tensors]))
        padded = []
        for leaf, length, longest in zip(
            tensors, lengths, map(max, zip(*of_ranks, strict=True)), strict=True
        ):
            sides = [longest - length, 0] if pad_first else [0, longest - length]
            around = [0, 0] * (leaf.ndim - 1 - dim % max(leaf.ndim, 1)) + sides
            padded.append(pad(leaf, around, value=pad_index) if longest > length else leaf)
        return rebuild(tensor, padded)


def wait_for_everyone(*, run: Run | None = None) -> None:
    """Return once every rank has called this.

    Raises:
        CollectiveError: another rank calls something else, or does not come in time.
    """
    with collective_call(run or current(), "world", "wait_for_everyone", None, objects=True) as call:
        call.all_objects(None)


@contextmanager
def split_between_processes(
    inputs: Any, apply_padding: bool = False, *, run: Run | None = None
) -> Iterator[Any]:
    """Give this reader's contiguous part of a sequence, tensor, array or dict.

    Not collective. If the length is not a multiple of the readers, the first readers get one item more.

    Args:
        inputs: a list, tuple, range, tensor or array, a table with a method `select` for rows (as Hugging
            Face datasets), or a dict of such values, which may contain dicts.
        apply_padding: repeat the last item until all readers have equally many items.
        run: the only live run by default.

    Raises:
        ValueError: the values of a dict differ in length.
        TypeError: `inputs` has another type, and there are several readers, which would all get all of it.
    """
    topology = (run or current()).topology
    lengths = {*_lengths(inputs)} if topology.readers > 1 or isinstance(inputs, Mapping) else set()
    if len(lengths) > 1:
        found = ", ".join(map(str, sorted(lengths)))
        raise ValueError(f"split_between_processes: values of a dict must have one length, got {found}")
    if topology.readers == 1:
        yield inputs
        return
    length = max(lengths, default=0)
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


def _reduced(
    call: CollectiveCall, plan: Plan, tensors: Sequence[Tensor], reduction: Reduction
) -> list[Tensor]:
    table = call.exchange(plan, tensors)
    if table is None:
        flat = plan.split(call.packed(plan, tensors))
        return plan.unflatten([call.group.all_reduce(together, reduction) for together in flat])
    of_ranks = plan.split(table)
    if reduction in ("min", "max"):
        return plan.unflatten([rows.amin(0) if reduction == "min" else rows.amax(0) for rows in of_ranks])
    sums = [rows.sum(0, dtype=rows.dtype) for rows in of_ranks]
    return plan.unflatten([total / call.size for total in sums] if reduction == "mean" else sums)


def _reducible(tensor: Tensor, reduction: Reduction) -> Tensor:
    """Convert a tensor to a dtype that process groups can reduce."""
    tensor, dtype = tensor.detach(), tensor.dtype
    inexact = dtype.is_floating_point or dtype.is_complex
    unordered = dtype.is_complex or dtype is torch.uint64
    if (reduction == "mean" and not inexact) or (reduction in ("min", "max") and unordered):
        raise TypeError(f"reduce: no {reduction} of {dtype}\nuse reduction='sum', or convert, as by .float()")
    if dtype is torch.bool:
        return tensor.to(torch.int64 if reduction == "sum" else torch.uint8)
    if dtype.is_floating_point and dtype.itemsize < 4:
        return tensor.float()
    return tensor.to(_WIDER.get(dtype, dtype))


def _lengths(value: Any) -> Iterator[int]:
    if isinstance(value, Mapping):
        for inner in value.values():
            yield from _lengths(inner)
    else:
        yield len(value)


def _part(value: Any, start: int, stop: int, missing: int) -> Any:
    if isinstance(value, Mapping):
        return {key: _part(item, start, stop, missing) for key, item in value.items()}
    if hasattr(value, "select") and not isinstance(value, Tensor):  # a slice of a table is not a table
        return value.select([*range(start, stop), *[len(value) - 1] * missing])
    if not isinstance(value, list | tuple | range | Tensor | np.ndarray):
        raise TypeError(
            f"split_between_processes: each process would get all of the {type(value).__name__}\n"
            "give a list, a tensor or an array with a first dimension, or a dict of such"
        )
    part = [*value[start:stop]] if isinstance(value, range) else value[start:stop]
    if not missing:
        return part
    if isinstance(value, Tensor):
        return torch.cat([part, value[-1:].expand(missing, *value.shape[1:])])  # type: ignore[list-item]
    if isinstance(value, np.ndarray):
        return np.concatenate([part, value[-1:].repeat(missing, 0)])
    return part + type(part)([value[-1]]) * missing  # type: ignore[operator]


def _join_objects(of_readers: list[Any]) -> Any:
    first = of_readers[0]
    if len({list if isinstance(value, tuple) else type(value) for value in of_readers}) > 1:
        return of_readers
    if isinstance(first, Mapping) and all(value.keys() == first.keys() for value in of_readers):
        return {key: _join_objects([mapping[key] for mapping in of_readers]) for key in first}
    if isinstance(first, Tensor) and all(value.ndim for value in of_readers):
        return torch.cat(of_readers)
    if _is_record(first) and len({len(value) for value in of_readers}) == 1:
        return _like_tuple(first, map(_join_objects, map(list, zip(*of_readers, strict=True))))
    if isinstance(first, list | tuple):
        return [item for sequence in of_readers for item in sequence]
    return of_readers


def _is_record(value: Any) -> bool:
    """Return whether a tuple holds several batches, as (predictions, references), rather than items."""
    batches = (list, tuple, Mapping, Tensor)
    return isinstance(value, tuple) and (
        hasattr(value, "_fields") or (bool(value) and all(isinstance(item, batches) for item in value))
    )


def _like_tuple(value: Any, items: Iterable[Any]) -> Any:
    return getattr(type(value), "_make", type(value))(items)


def _cut_objects(gathered: Any, length: int) -> Any:
    if isinstance(gathered, dict):
        return {key: _cut_objects(value, length) for key, value in gathered.items()}
    if isinstance(gathered, tuple):
        return _like_tuple(gathered, (_cut_objects(value, length) for value in gathered))
    return gathered[:length]


BUCKET_BYTES: Final = 256 * 2**20
"""Size of the buffers in which weights are averaged: a copy of all weights might not fit in memory."""


def average(averaged: Iterable[Tensor], group: Collectives) -> None:
    """Average tensors over the group, in place, with one all_reduce per bucket of a dtype and device."""
    kinds: dict[Any, list[Tensor]] = {}
    filled: Counter[Any] = Counter()
    for tensor in averaged:
        kind = tensor.dtype, tensor.device
        kinds.setdefault((*kind, filled[kind] // BUCKET_BYTES), []).append(tensor.detach())
        filled[kind] += tensor.nbytes
    for tensors in kinds.values():
        flat = group.all_reduce(torch.cat([tensor.flatten() for tensor in tensors]), "mean")
        parts = flat.split([tensor.numel() for tensor in tensors])
        means = [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]
        torch._foreach_copy_(tensors, means)

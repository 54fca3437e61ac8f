"""Collectives and random streams of the current run, and helpers for nested data."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from accel_compat import runs
from accel_compat.configs.enums import RNGType
from accel_core import CollectiveError, Run, ops
from accel_core import set_seed as _set_seed
from accel_core import synchronize_rng_state as _synchronize_one

DistributedOperationException = CollectiveError
concatenate, convert_to_fp32 = ops.concatenate, ops.convert_to_fp32

_FLOATS = (torch.float, torch.double, torch.half, torch.bfloat16)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)
TENSOR_TYPE_TO_INT = {dtype: number for number, dtype in enumerate((*_FLOATS, *_INTEGERS), 1)}
TENSOR_INT_TO_DTYPE = {number: dtype for dtype, number in TENSOR_TYPE_TO_INT.items()}


def listify(data: Any) -> Any:
    """Return the same structure with lists of numbers in place of tensors.

    A 0-dim tensor gives a number.
    """
    return ops.recursively_apply(torch.Tensor.tolist, data)


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function to return `convert_to_fp32` of its result.

    The result can be pickled if the function can.
    """
    return functools.update_wrapper(functools.partial(_in_fp32, model_forward), model_forward)


def _in_fp32(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return convert_to_fp32(function(*args, **kwargs))


ConvertOutputsToFp32 = convert_outputs_to_fp32


def is_torch_tensor(tensor: Any) -> bool:
    """Tell whether an object is a tensor."""
    return isinstance(tensor, torch.Tensor)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Return the structure with `func(leaf, …)` for leaves that `test_type` accepts."""

    def applied(leaf: Any) -> Any:
        if test_type(leaf):
            return func(leaf, *args, **kwargs)
        raise TypeError(
            f"Unsupported types ({type(leaf)}) passed to `{func.__name__}`. Only nested list/tuple/dicts of"
            f" objects that are valid for `{test_type.__name__}` should be passed."
        )

    judge = _is_leaf if error_on_other_type else test_type
    return ops.recursively_apply(applied, data, test_type=judge)


def _is_leaf(value: Any) -> bool:
    return not isinstance(value, (tuple, list, Mapping))


class CannotPadNestedTensorWarning(UserWarning):
    """A nested tensor came to `pad_across_processes`, and stays as it is."""


def is_namedtuple(data: Any) -> bool:
    """Tell whether an object is a named tuple."""
    return isinstance(data, tuple) and hasattr(data, "_asdict") and hasattr(data, "_fields")


def send_to_device(tensor: Any, device: Any, non_blocking: bool = False, skip_keys: Any = None) -> Any:
    """Move the structure's tensors (and all with `to`); `skip_keys` stay."""
    return ops.send_to_device(tensor, device, non_blocking, skip_keys)


def get_shape(data: Any) -> Any:
    """Return the structure with each tensor's shape as a list."""
    return recursively_apply(lambda tensor: list(tensor.shape), data)


def find_batch_size(data: Any) -> int | None:
    """Return the first dimension of the first tensor."""
    if isinstance(data, (tuple, list, Mapping)) and not data:
        raise ValueError(f"Cannot find the batch size from empty {type(data)}.")
    if isinstance(data, (tuple, list)):
        return find_batch_size(data[0])
    if isinstance(data, Mapping):
        return find_batch_size(next(iter(data.values())))
    if not isinstance(data, torch.Tensor):
        raise TypeError(f"Can only find the batch size of tensors but got {type(data)}.")
    return data.shape[0]


def ignorant_find_batch_size(data: Any) -> int | None:
    """Find the batch size, or None."""
    try:
        return find_batch_size(data)
    except (ValueError, TypeError):
        return None


def all_tensors(data: Any) -> bool:
    """Tell whether a structure has nothing but tensors."""
    try:
        recursively_apply(lambda tensor: tensor, data, error_on_other_type=True)
    except TypeError:
        return False
    return True


def _alone() -> bool:
    run = runs.newest()
    return run is None or run.world.size == 1


def _over_ranks(operation: Callable[..., Any], value: Any, *args: Any) -> Any:
    """Call accel-core's collective for the current run.

    A process that is alone gets its value back.
    """
    return value if _alone() else operation(value, *args, run=runs.current())


def gather(tensor: Any) -> Any:
    """Concatenate each tensor over all ranks, along dim 0. Collective."""
    return _over_ranks(functools.partial(ops.gather, every_rank=True), tensor)


def gather_object(object: Any) -> Any:
    """Concatenate the lists of all ranks. Collective."""
    return _over_ranks(functools.partial(ops.gather_object, every_rank=True), object)


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Each tensor as one rank has it. Collective."""
    return _over_ranks(ops.broadcast, tensor, from_process)


def broadcast_object_list(object_list: Any, from_process: int = 0) -> Any:
    """Fill the list with one rank's objects. Collective."""
    return _over_ranks(ops.broadcast_object_list, object_list, from_process)


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Sum or mean over all ranks. Collective.

    scale: counts on XLA devices only, as in Accelerate.
    """
    return reduced_over(runs.newest(), tensor, reduction, scale)


def reduced_over(run: Run | None, tensor: Any, reduction: str, scale: float) -> Any:
    """`reduce`, over the ranks of a run."""
    if run is None or run.world.size == 1:
        return recursively_apply(torch.clone, tensor, error_on_other_type=True)
    factor = scale if run.device.type == "xla" else 1.0
    return ops.reduce(tensor, reduction, factor, run=run)  # type: ignore[arg-type]


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
    """Pad each tensor to the longest on any rank. Collective."""
    if getattr(tensor, "is_nested", False):
        warnings.warn(
            "Cannot pad nested tensors without more information. Leaving unprocessed.",
            CannotPadNestedTensorWarning,
            stacklevel=2,
        )
        return tensor
    if _alone():
        return recursively_apply(_same, tensor, error_on_other_type=True)
    return ops.pad_across_processes(tensor, dim, pad_index, pad_first, run=runs.current())


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def gather_tensor_shape(tensor: torch.Tensor | None) -> tuple[torch.Size, torch.dtype]:
    """Return the shape and dtype of the one tensor that some rank has. Collective."""
    mine = None if tensor is None else (tensor.shape, tensor.dtype)
    found: tuple[torch.Size, torch.dtype] = next(each for each in gather_object([mine]) if each is not None)
    return found


def copy_tensor_to_devices(tensor: Any = None) -> torch.Tensor:
    """On all ranks, the one tensor that some rank has. Collective."""
    run = runs.current()
    shape, dtype = gather_tensor_shape(tensor)
    mine = torch.zeros(shape, dtype=dtype, device=run.device) if tensor is None else tensor.to(run.device)
    summed: torch.Tensor = reduce(mine, "sum")
    return summed.to(dtype)  # booleans are counted


def slice_tensors(
    data: Any, tensor_slice: Any, process_index: int | None = None, num_processes: int | None = None
) -> Any:
    """Take a slice of each tensor."""
    return recursively_apply(lambda tensor: tensor[tensor_slice], data)


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Repeat the last samples, so that a batch divides among that many processes."""
    missing = -batch_size % num_processes

    def pad(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[dim] != batch_size:
            return tensor
        last = tensor.narrow(dim, batch_size - 1, 1)
        return torch.cat([tensor, *[last] * missing], dim)

    return recursively_apply(pad, data=tensor, error_on_other_type=True) if missing else tensor


def find_device(data: Any) -> torch.device | None:
    """Return the device of the first tensor in a structure."""
    if isinstance(data, Mapping):
        data = list(data.values())
    if isinstance(data, (tuple, list)):
        return next((device for each in data if (device := find_device(each)) is not None), None)
    return data.device if isinstance(data, torch.Tensor) else None


@contextmanager
def GatheredParameters(  # noqa: N802  its name there
    params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
) -> Any:
    """deepspeed's context of that name under ZeRO-3; elsewhere parameters are whole."""
    from accel_compat.configs.enums import DistributedType
    from accel_compat.state.states import distributed_type

    run = runs.newest()
    if run is None or distributed_type(run) != DistributedType.DEEPSPEED:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(params, modifier_rank, fwd_module, enabled):
        yield


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed `random`, numpy, torch and the device.

    device_specific: another seed on each rank.
    """
    if not 0 <= seed < 2**32:
        raise ValueError("Seed must be between 0 and 2**32 - 1")
    run = runs.find_or_make(False) if device_specific else runs.newest()
    _set_seed(seed, bool(device_specific), deterministic, run=run)


def synchronize_rng_state(rng_type: Any = None, generator: Any = None) -> None:
    """Give all ranks rank 0's stream. Collective."""
    run = runs.newest()
    if run is not None and run.world.size > 1:
        _synchronize_one(str(getattr(rng_type, "value", rng_type)), generator, run=run)


def synchronize_rng_states(rng_types: Sequence[Any], generator: Any = None) -> None:
    """Give all ranks rank 0's streams. Collective.

    Raises:
        ValueError: there is no such stream.
    """
    for rng_type in rng_types:
        synchronize_rng_state(RNGType(rng_type), generator)

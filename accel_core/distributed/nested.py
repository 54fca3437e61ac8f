"""Walk nested structures of tensors, with their types preserved.

No function communicates. torch.utils._pytree takes subclasses of dict and list, other mappings and
dataclasses for leaves, and its map over a batch takes four times as long.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "concatenate",
    "convert_to_fp32",
    "find_batch_size",
    "recursively_apply",
    "send_to_device",
    "slice_tensors",
]

DESCRIBED: Final = 10_000
"""Most places of a structure that `describe` returns."""
_LEAF: Final = object()
_PLAIN: Final = (Tensor, torch.nn.Parameter)
_SEQUENCES: Final = (list, tuple)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = lambda value: isinstance(value, Tensor),
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Apply `func(leaf, *args, **kwargs)` to each leaf that `test_type` accepts.

    Structures are lists, tuples (named ones too), mappings and dataclasses, subclasses included; each
    keeps its type. Other leaves stay as they are.

    Raises:
        TypeError: `test_type` refuses a leaf, and `error_on_other_type` is set.
    """

    def visit(value: Any) -> Any:
        kind = type(value)
        if kind is not dict and kind is not list and test_type(value):
            return func(value, *args, **kwargs)
        changed = _mapped(value, visit)
        if changed is not _LEAF:
            return changed
        if error_on_other_type:
            raise TypeError(
                f"{getattr(func, '__name__', 'this operation')} takes nested tensors, but found a leaf"
                f" of type {kind.__qualname__}"
            )
        return value

    return visit(data)


def leaves(data: Any, operation: str) -> tuple[list[Tensor], tuple[Any, ...]]:
    """Return a structure's tensors in order, and a hashable description of the structure.

    Raises:
        TypeError: a leaf is neither None nor a plain, dense tensor; the message names `operation` and the
            place.
    """
    tensors: list[Tensor] = []
    shape: list[Any] = []

    def visit(value: Any) -> None:
        found = children_of(value)
        if found is None:
            if value is not None:
                raise TypeError(_refusal(data, operation, value))
            shape.append(("NoneType", 0, len(tensors)))
            return
        keys, children = found
        named = type(keys) is not range and tuple(map(repr, keys))  # 1 is not '1'
        shape.append((type(value).__qualname__, named or len(children), len(tensors)))
        for child in children:
            if isinstance(child, Tensor):
                tensors.append(child)
            else:
                visit(child)

    tensors.append(data) if isinstance(data, Tensor) else visit(data)
    strided = torch.strided
    for tensor in tensors:
        odd = tensor.layout is not strided or tensor.is_nested or tensor.is_quantized
        if odd or (type(tensor) not in _PLAIN and hasattr(tensor, "full_tensor")):
            raise TypeError(_refusal(data, operation, tensor))
    return tensors, tuple(shape)


def _refusal(data: Any, operation: str, leaf: Any) -> str:
    place = next((place for place, value in walk(data) if value is leaf), "") or "it"
    remedy = "use gather_object (gather_for_metrics: use_gather_object=True) for other objects than tensors"
    what = type(leaf).__qualname__
    if isinstance(leaf, Tensor):
        what = f"nested {what}" if leaf.is_nested else f"quantized {what}" if leaf.is_quantized else what
        what += "" if leaf.layout is torch.strided else f" of layout {leaf.layout}"
        remedy = (
            "give plain tensors: .to_dense(); .dequantize(); .to_padded_tensor(0); .full_tensor(), the whole;"
            " .to_local(), this rank's part"
        )
    return f"{operation} takes nested tensors, but {place} is a {what}\n{remedy}"


class Description(NamedTuple):
    """A value of a structure, for messages."""

    text: str
    """The type, or the shape and dtype of a tensor."""
    is_tensor: bool = False


def describe(data: Any) -> dict[str, Description]:
    """Return a description per place of a structure, for at most `DESCRIBED` places."""

    def described(value: Any) -> Description:
        if isinstance(value, Tensor):
            return Description(shape_and_dtype(value), is_tensor=True)
        return Description(type(value).__qualname__)

    return {place: described(value) for place, value in islice(walk(data), DESCRIBED)}


def shape_and_dtype(tensor: Tensor) -> str:
    """Return shape and dtype as text, such as "(2, 3) float32"."""
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def rebuild(data: Any, tensors: Iterable[Tensor]) -> Any:
    """Copy a structure with its tensors replaced by `tensors`, in the order of `leaves`."""
    take = iter(tensors).__next__

    def visit(value: Any) -> Any:
        if type(value) is dict:  # fast path for the common case: no call per leaf
            return {key: take() if isinstance(of, Tensor) else visit(of) for key, of in value.items()}
        if isinstance(value, Tensor):
            return take()
        changed = _mapped(value, visit)
        return value if changed is _LEAF else changed

    return visit(data)


def concatenate(data: Sequence[Any], dim: int = 0) -> Any:
    """Concatenate the tensors of equal structures along `dim`.

    A single structure is returned as it is.

    Raises:
        TypeError: the structures differ, or hold values other than tensors.
    """
    if len(data) == 1:
        return data[0]
    flat = [leaves(structure, "concatenate") for structure in data]
    if any(shape != flat[0][1] for _, shape in flat):
        raise TypeError("concatenate takes equal structures, but these differ in types, lengths or keys")
    columns = zip(*(tensors for tensors, _ in flat), strict=True)
    return rebuild(data[0], [torch.cat(column, dim=dim) for column in columns])


def slice_tensors(data: Any, tensor_slice: slice | int | Tensor) -> Any:
    """Slice each tensor of a structure along its first dimension."""
    return recursively_apply(lambda tensor: tensor[tensor_slice], data)


def convert_to_fp32(tensor: Any) -> Any:
    """Convert a structure's fp16 and bf16 tensors to fp32; gradients flow through."""

    def convert(leaf: Tensor) -> Tensor:
        return leaf.float() if leaf.dtype in (torch.float16, torch.bfloat16) else leaf

    return recursively_apply(convert, tensor)


def find_batch_size(data: Any) -> int:
    """Return the size of the first dimension of the first tensor that has one.

    Raises:
        TypeError: no tensor has a dimension.
    """
    first = next((value for _, value in walk(data) if isinstance(value, Tensor) and value.ndim), None)
    if first is None:
        raise TypeError(f"find_batch_size: no tensor with a first dimension in a {type(data).__qualname__}")
    return int(first.shape[0])


def send_to_device(
    data: Any,
    device: torch.device | str | int,
    non_blocking: bool = False,
    skip_keys: str | Sequence[str] | None = None,
) -> Any:
    """Move a structure to `device`.

    An object that has a method `to` is moved by this method.

    Args:
        data: the structure.
        device: the device to move to.
        non_blocking: passed to `to`, if the method takes it.
        skip_keys: keys of mappings whose values are not moved.
    """
    skipped = {skip_keys} if isinstance(skip_keys, str) else set(skip_keys or ())

    def visit(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(device, non_blocking=non_blocking)
        if hasattr(value, "to") and not (skipped and isinstance(value, Mapping)):
            return _moved(value, device, non_blocking)
        if skipped and isinstance(value, Mapping):
            return _like(value, [(k, v if k in skipped else visit(v)) for k, v in value.items()])
        changed = _mapped(value, visit)
        return value if changed is _LEAF else changed

    return visit(data)


def _moved(value: Any, device: torch.device | str | int, non_blocking: bool) -> Any:
    if non_blocking:
        with suppress(TypeError):  # an object's `to` may take a device only
            return value.to(device, non_blocking=True)
    return value.to(device)


def walk(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (place, value) for a structure and for each value in it."""
    yield place, value
    if not isinstance(value, Tensor):
        for key, child in zip(*(children_of(value) or ((), ())), strict=True):
            yield from walk(child, f"{place}[{key!r}]")


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy of a structure with each child changed, or _LEAF for a leaf."""
    kind = type(value)
    if kind is dict:  # fast paths for the common cases
        return {key: change(child) for key, child in value.items()}
    if kind is list:
        return [change(child) for child in value]
    found = children_of(value)
    return _LEAF if found is None else _like(value, list(zip(found[0], map(change, found[1]), strict=True)))


def children_of(value: Any) -> tuple[Collection[Any], Collection[Any]] | None:
    """Return the keys and the children of a structure; None for a leaf.

    The keys of a sequence are a range.
    """
    if isinstance(value, Mapping):
        return value.keys(), value.values()
    if isinstance(value, _SEQUENCES):
        return range(len(value)), value
    if isinstance(value, type):
        return None
    if not dataclasses.is_dataclass(value):
        return None
    names = [field.name for field in dataclasses.fields(value)]
    return names, [getattr(value, name) for name in names]


def _like(value: Any, children: list[tuple[Any, Any]]) -> Any:
    """Copy a structure, its type included, with other children."""
    if isinstance(value, tuple):
        make = getattr(type(value), "_make", type(value))  # named tuples may have a constructor of their own
        return make([child for _, child in children])
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return type(value)(dict(children))  # type: ignore[call-arg]
    # A shallow copy keeps default factories and a subclass's own attributes.
    same = copy.copy(value)
    for key, child in children:
        if isinstance(same, MutableMapping | list):
            same[key] = child
        else:
            object.__setattr__(same, key, child)
    return same

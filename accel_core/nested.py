"""Nested structures of tensors: walking them with their types preserved. No communication."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

__all__ = [
    "concatenate",
    "describe",
    "find_batch_size",
    "is_torch_tensor",
    "leaves",
    "rebuild",
    "recursively_apply",
    "send_to_device",
    "slice_tensors",
]


def is_torch_tensor(value: Any) -> bool:
    """Whether `value` is a tensor."""
    return isinstance(value, Tensor)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """The same structure with `func(leaf, *args, **kwargs)` for each leaf that `test_type` accepts.

    Structures are lists, tuples (named ones too), mappings, attrs classes and dataclasses, subclasses
    included; each keeps its type. Other leaves stay as they are.

    Raises:
        TypeError: another leaf was found, and `error_on_other_type` is set.
    """

    def visit(value: Any) -> Any:
        kind = type(value)
        if kind is list or kind is dict:  # the common cases, without the questions below
            pass
        elif test_type(value):
            return func(value, *args, **kwargs)
        children = _children(value)
        if children is not None:
            return _like(value, [(key, visit(child)) for key, child in children])
        if error_on_other_type:
            raise TypeError(
                f"{getattr(func, '__name__', 'this operation')} takes nested tensors, but found a leaf"
                f" of type {kind.__qualname__}"
            )
        return value

    return visit(data)


def leaves(data: Any, operation: str) -> tuple[list[Tensor], list[Any]]:
    """(the tensors of a structure in order, a marshallable description of the structure itself).

    Raises:
        TypeError: a leaf is no tensor; the message names `operation` and the leaf's place.
    """
    tensors: list[Tensor] = []
    shape: list[Any] = []

    def visit(value: Any, *path: Any) -> None:
        if isinstance(value, Tensor):
            tensors.append(value)
            return
        children = _children(value)
        if children is None:
            place = "".join(f"[{key!r}]" for key in path) or "it"
            raise TypeError(
                f"{operation} takes nested tensors, but {place} is a {type(value).__qualname__}\n"
                "use gather_object (gather_for_metrics: use_gather_object=True) for what is no tensor"
            )
        shape.append(type(value).__qualname__)
        for key, child in children:
            shape.append(str(key))
            visit(child, *path, key)

    visit(data)
    return tensors, shape


def describe(data: Any) -> dict[str, str]:
    """What is where in a structure, for people: place -> type, or shape and dtype."""
    found: dict[str, str] = {}

    def visit(value: Any, path: str) -> None:
        children = None if isinstance(value, Tensor) else _children(value)
        if isinstance(value, Tensor):
            found[path] = f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
        else:
            found[path] = type(value).__qualname__
        for key, child in children or ():
            visit(child, f"{path}[{key!r}]")

    visit(data, "")
    return found


def rebuild(data: Any, tensors: Iterable[Tensor]) -> Any:
    """The structure `data` with its tensors replaced, in the order of `leaves`."""
    following = iter(tensors)
    return recursively_apply(lambda _: next(following), data)


def concatenate(data: Sequence[Any], dim: int = 0) -> Any:
    """One structure whose tensors are those of equal structures, concatenated along `dim`.

    A single structure is returned as it is.

    Raises:
        TypeError: the structures differ, or hold something else than tensors.
    """
    if len(data) == 1:
        return data[0]
    flat = [leaves(each, "concatenate") for each in data]
    if any(shape != flat[0][1] for _, shape in flat):
        raise TypeError("concatenate takes equal structures, but these differ in types, lengths or keys")
    return rebuild(
        data[0], [torch.cat(column, dim=dim) for column in zip(*(t for t, _ in flat), strict=True)]
    )


def slice_tensors(data: Any, tensor_slice: slice | int | Tensor) -> Any:
    """The same structure with each tensor sliced along its first dimension."""
    return recursively_apply(lambda tensor: tensor[tensor_slice], data)


def find_batch_size(data: Any) -> int:
    """The size of the first dimension of the first tensor that has one.

    Raises:
        TypeError: there is no such tensor.
    """
    found = next((t for t in _tensors(data) if t.ndim), None)
    if found is None:
        raise TypeError(f"find_batch_size: no tensor with a first dimension in a {type(data).__qualname__}")
    return int(found.shape[0])


def send_to_device(
    data: Any,
    device: torch.device | str | int,
    non_blocking: bool = False,
    skip_keys: str | Sequence[str] | None = None,
) -> Any:
    """The same structure on `device`. What has a method `to` of its own is moved by it.

    skip_keys: keys of mappings whose values stay where they are.
    """
    skipped = {skip_keys} if isinstance(skip_keys, str) else set(skip_keys or ())

    def visit(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(device, non_blocking=non_blocking)
        if hasattr(value, "to") and not skipped:
            return value.to(device)
        children = _children(value)
        if children is None:
            return value
        named = isinstance(value, Mapping)
        return _like(value, [(k, v if named and k in skipped else visit(v)) for k, v in children])

    return visit(data)


def _tensors(data: Any) -> Iterator[Tensor]:
    if isinstance(data, Tensor):
        yield data
    else:
        for _, child in _children(data) or ():
            yield from _tensors(child)


def _children(value: Any) -> list[tuple[Any, Any]] | None:
    """(key, child) of a structure; None for a leaf."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    if isinstance(value, type):
        return None
    if attrs.has(type(value)):
        return [(a.name, getattr(value, a.name)) for a in attrs.fields(type(value))]
    if dataclasses.is_dataclass(value):
        return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
    return None


def _like(value: Any, children: list[tuple[Any, Any]]) -> Any:
    """A structure like `value`, of the same type, with other children."""
    kind = type(value)
    if kind is dict:
        return dict(children)
    if isinstance(value, list | tuple):
        items = [child for _, child in children]
        return kind(*items) if hasattr(value, "_fields") else kind(items)
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return kind(dict(children))
    # A shallow copy keeps what is no child: a default factory, a subclass's own attributes.
    same = copy.copy(value)
    for key, child in children:
        if isinstance(same, MutableMapping):
            same[key] = child
        else:
            object.__setattr__(same, key, child)
    return same

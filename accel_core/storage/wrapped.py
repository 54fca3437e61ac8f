"""Nested data with tensors that wrap others: a save takes the wrappers apart, a load rebuilds them."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import copy
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from accel_core.errors import CheckpointError
from accel_core.storage.leaves import layout_of, parts_of, wraps

if TYPE_CHECKING:
    from torch import Tensor

_MAPPINGS: Final = frozenset({dict, OrderedDict, defaultdict})


@frozen(eq=False)
class Parts:
    """The tensors of a wrapper by name; they can be loaded only into a wrapper of the same layout."""

    layout: str
    tensors: Mapping[str, Tensor]


def taken_apart(value: Any) -> Any:
    """Return nested data in which each wrapper is replaced by its `Parts`."""

    def change(each: Any, _: object) -> Any:
        if not wraps(each):
            return each
        return Parts(layout_of(each), {name: part.detach() for name, part, _ in parts_of(each)})

    return _mapped(value, change)


def put_together(value: Any, here: Callable[[], Any], what: str) -> Any:
    """Return nested data in which each `Parts` is replaced by a wrapper.

    The class of a wrapper is taken from the current data, never from the file: files must not create objects.

    Args:
        value: the data from the checkpoint.
        here: returns the current data, which must have a wrapper of the same layout at the same path.
        what: name of the data in error messages.

    Raises:
        CheckpointError: the current data has no such wrapper.
    """

    def change(each: Any, path: tuple[Any, ...]) -> Any:
        if not isinstance(each, Parts):
            return each
        like = here()
        with suppress(LookupError, TypeError):
            for key in path:
                like = like[key]
            if wraps(like) and layout_of(like) == each.layout:
                return _wrapper_like(like, each.tensors)
        place = what + "".join(f"[{key!r}]" for key in path)
        raise CheckpointError(
            f"{place} was saved as {each.layout}, and state_dict() has no such tensor there now\n"
            "load it into an object that has one"
        )

    return _mapped(value, change)


def _mapped(value: Any, change: Callable[[Any, tuple[Any, ...]], Any], path: tuple[Any, ...] = ()) -> Any:
    """Return nested lists, tuples and mappings with each value inside replaced by `change(value, path)`."""
    kind = type(value)
    if kind in (list, tuple):
        return kind(_mapped(each, change, (*path, number)) for number, each in enumerate(value))
    if kind in _MAPPINGS:  # exact types: `encode` refuses subclasses
        made = copy(value)
        for key, each in value.items():
            made[key] = _mapped(each, change, (*path, key))
        return made
    return change(value, path)


def _wrapper_like(tensor: Any, parts: Mapping[str, Tensor], prefix: str = "") -> Tensor:
    """Return a wrapper with the class and context of `tensor`, made from the named parts."""
    keys, context = tensor.__tensor_flatten__()
    found: dict[str, Tensor] = {}
    for key in keys:
        part, name = getattr(tensor, key), prefix + key
        found[key] = _wrapper_like(part, parts, f"{name}#") if wraps(part) else parts[name].to(part.device)
    made: Tensor = type(tensor).__tensor_unflatten__(found, context, tensor.shape, tensor.stride())
    return made

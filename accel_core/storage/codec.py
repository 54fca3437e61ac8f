"""Tagged JSON: plain Python state as JSON text, and back with the same types.

JSON alone turns tuples into lists and integer keys into text, and has no infinity: a scheduler
restored from plain JSON skips its milestones. A type that JSON lacks is stored as an object with one key
that starts with "$" (docs/checkpoint-format.md lists the keys). Decoding builds data only: the decoder
imports nothing and calls nothing that a file names.
"""

from __future__ import annotations

import math
from base64 import b64decode, b64encode
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from accel_core.errors import CheckpointError
from accel_core.storage.tensor_bytes import DTYPES, bytes_of, name_of, tensor_from
from accel_core.storage.wrapped import Parts

INLINE_BYTES: Final = 1 << 16
"""Larger tensors go to the data file, if the caller passes a `Store`."""


Store = Callable[[str, Tensor], str]
"""Function that stores a tensor: (path in the state, tensor) -> key."""
Fetch = Callable[[str], Tensor]
"""Function that returns the tensor of a key that a `Store` returned."""
_FACTORIES: Final = {kind.__name__: kind for kind in (list, dict, set, tuple, int, float, str, bool)}
"""Types that may be the default factory of a defaultdict."""
_NOWHERE: Final[Mapping[str, Tensor]] = {}
_PLAIN: Final = frozenset({bool, int, str, type(None)})
"""Types that are valid JSON as they are."""


def not_plain(tensor: Tensor) -> str:
    """Return a description of a tensor that cannot be stored, for an error message; "" for other tensors."""
    if type(tensor) is not Tensor and is_lazy(tensor):
        return "a lazy tensor without a shape, before the first batch,"
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout}"
    if tensor.is_quantized:
        return f"a quantised tensor ({name_of(tensor.dtype)})"
    return f"a tensor on {tensor.device}, without values," if tensor.is_meta else ""


def require_plain(what: str, tensor: Tensor) -> None:
    """Raise CheckpointError if the tensor cannot be stored."""
    if odd := not_plain(tensor):
        raise CheckpointError(
            f"{what} is {odd} and cannot be stored\n"
            "make it an ordinary tensor, or a buffer with persistent=False that the model computes again"
        )


def encode(value: Any, path: str, store: Store | None = None) -> Any:
    """Return `value` as data that `json.dumps` accepts.

    Types are matched exactly: a subclass could not be rebuilt without running its code.

    Raises:
        CheckpointError: a value inside is not plain data; the message names its path.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if kind is list:
        if _PLAIN.issuperset(map(type, value)):  # fast path, for the 625 numbers of a random state
            return value[:]
        return [encode(item, f"{path}[{number}]", store) for number, item in enumerate(value)]
    if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
        return {
            key: item if type(item) in _PLAIN else encode(item, f"{path}{_step(key)}", store)
            for key, item in value.items()
        }
    if kind in (dict, OrderedDict, Counter, defaultdict):
        items = [(key, encode(item, f"{path}[{key!r}]", store)) for key, item in value.items()]
        body = [[encode(key, f"{path} key", store), item] for key, item in items]
        return {_TAG_OF[kind]: [_factory(value, path), body] if kind is defaultdict else body}
    if isinstance(value, Tensor):
        if odd := not_plain(value):
            raise _refusal(path, odd)
        if kind in _TAG_OF and store is not None and value.nbytes > INLINE_BYTES:
            return {"$stored": store(path, value.detach())}
    tag = "$scalar" if isinstance(value, np.generic) else _TAG_OF.get(kind)
    if tag in ("$array", "$scalar") and value.dtype.kind not in _KINDS:
        raise _refusal(path, f"an array of dtype {value.dtype}")
    if tag is None:
        raise _refusal(path, f"a {kind.__module__}.{kind.__qualname__}")
    body = encode(_TAGS[tag][1](value), path, store)
    # The order of a set of strings differs between processes, and ranks compare their encoded states.
    return {tag: sorted(body, key=repr) if isinstance(value, set | frozenset) else body}


def decode(value: Any, path: str, fetch: Fetch = _NOWHERE.__getitem__) -> Any:
    """Return the value of tagged JSON that `json.loads` has parsed; its tensors are on the CPU.

    Raises:
        CheckpointError: a tag is unknown or malformed; the message names its path.
    """
    if isinstance(value, list):
        if _PLAIN.issuperset(map(type, value)):
            return value[:]
        return [decode(item, f"{path}[{number}]", fetch) for number, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "") if len(value) == 1 else ""
    if not tag.startswith("$"):
        return {key: decode(item, f"{path}.{key}", fetch) for key, item in value.items()}
    body = decode(value[tag], path, fetch)
    try:
        return fetch(body) if tag == "$stored" else _MAKE[tag](body)
    except (LookupError, ValueError, TypeError, AttributeError, RuntimeError, ArithmeticError) as error:
        # The errors that constructors raise for a damaged or crafted body.
        about = f"{path}: {tag} is unknown or malformed ({error})"
        raise CheckpointError(
            f"{about}\nload another checkpoint; `accel checkpoint list` names them"
        ) from error


def is_same(one: Any, other: Any) -> bool:
    """Return True if two values of plain data are equal to the last bit; NaN equals NaN."""
    return bool(encode(one, "value") == encode(other, "value"))


def _step(key: str) -> str:
    """Return a key as a step of a path. Paths are unique: large tensors are stored under their path."""
    return f"[{key!r}]" if "." in key or "[" in key else f".{key}"


def _refusal(path: str, problem: str) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be stored: {problem} is not plain data\n"
        "let state_dict() return, or extra have, numbers, text, bytes, dense tensors, arrays of numbers or"
        " text, or tuples, lists, sets, dicts of them"
    )


def _factory(value: defaultdict[Any, Any], path: str) -> str | None:
    made = value.default_factory
    if made is None:
        return None
    if made not in _FACTORIES.values():
        raise _refusal(path, f"a defaultdict of {made!r}")
    return made.__name__


def _text(data: Any) -> str:
    return b64encode(data).decode("ascii")


_bytes: Final = partial(b64decode, validate=True)


def _array(body: Any) -> Any:
    dtype, shape, text = body
    if np.dtype(dtype).kind not in _KINDS:
        raise ValueError(f"dtype {dtype}")
    return np.frombuffer(_bytes(text), dtype=dtype).reshape(shape).copy()


def _of_array(value: Any) -> list[Any]:
    return [value.dtype.str, list(value.shape), _text(value.tobytes())]


_KINDS: Final = "biufcSUMm"
"""numpy's dtype kinds whose arrays are fully described by their bytes."""

_TAGS: Final[Mapping[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]]] = {
    "$float": (float, repr, float),
    "$complex": (complex, lambda value: [value.real, value.imag], lambda body: complex(*body)),
    "$bytes": (bytes, _text, _bytes),
    "$bytearray": (bytearray, _text, lambda body: bytearray(_bytes(body))),
    "$range": (range, lambda value: [value.start, value.stop, value.step], lambda body: range(*body)),
    "$path": (type(Path()), str, Path),
    "$tuple": (tuple, list, tuple),
    "$size": (torch.Size, list, torch.Size),
    "$set": (set, list, set),
    "$frozenset": (frozenset, list, frozenset),
    "$deque": (deque, lambda value: [value.maxlen, list(value)], lambda body: deque(body[1], body[0])),
    "$dict": (dict, dict.items, dict),
    "$defaultdict": (
        defaultdict,
        dict.items,
        lambda body: defaultdict(body[0] and _FACTORIES[body[0]], dict(body[1])),
    ),
    "$ordered": (OrderedDict, dict.items, OrderedDict),
    "$counter": (Counter, dict.items, lambda body: Counter(dict(body))),
    "$dtype": (torch.dtype, name_of, DTYPES.__getitem__),
    "$device": (torch.device, str, torch.device),
    "$tensor": (
        Tensor,
        lambda value: [name_of(value.dtype), list(value.shape), _text(bytes_of(value))],
        lambda body: tensor_from(bytearray(_bytes(body[2])), *body[:2]),
    ),
    "$parts": (Parts, lambda value: [value.layout, value.tensors], lambda body: Parts(*body)),
    "$array": (np.ndarray, _of_array, _array),
    "$scalar": (np.generic, _of_array, lambda body: _array(body)[()]),
}
"""Tag -> (type, function value -> body, function decoded body -> value). The body is encoded in turn."""

_MAKE: Final = {tag: make for tag, (_, _, make) in _TAGS.items()}

_TAG_OF: Final = {kind: tag for tag, (kind, _, _) in _TAGS.items()} | {torch.nn.Parameter: "$tensor"}

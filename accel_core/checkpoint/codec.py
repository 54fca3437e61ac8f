"""Tagged JSON: plain Python state as JSON text, back as equal values of equal types, and nothing else.

JSON alone turns tuples into lists and integer keys into text, and knows no infinity: a scheduler
restored from it skips its milestones. Here what JSON cannot say is an object with one key that
starts with "$" (docs/checkpoint-format.md lists them). Decoding builds data only, it runs no code.
"""

from __future__ import annotations

import math
import sys
from base64 import b64decode, b64encode
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from accel_core.checkpoint.memory import bytes_of, tensor_from
from accel_core.errors import CheckpointError

__all__ = ["DTYPES", "decode", "encode", "name_of"]

INLINE_BYTES: Final = 1 << 16
"""Larger tensors go to the data file, where there is one to take them."""

DTYPES: Final[Mapping[str, torch.dtype]] = {
    name: value
    for name, value in vars(torch).items()
    if isinstance(value, torch.dtype) and f"torch.{name}" == str(value)
}

_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}

Store = Callable[[str, Tensor], str]
"""(path in the state, tensor) -> the key under which the tensor is stored elsewhere."""
Fetch = Callable[[str], Tensor]
"""The key given by a `Store` -> the tensor."""


def name_of(dtype: torch.dtype) -> str:
    """The name torch gives a dtype, without the prefix."""
    return _NAMES[dtype]


def encode(value: Any, path: str, store: Store | None = None) -> Any:
    """`value` as what `json.dumps` takes.

    Types are matched exactly: a subclass could not be rebuilt without running its code.

    Raises:
        CheckpointError: something in it is not plain data; the message names its path.
    """
    try:
        return _Encoder(store).encode(value, path)
    except RecursionError:
        raise CheckpointError(f"{path} contains itself, or is nested too deeply to be stored") from None


def decode(value: Any, path: str, fetch: Fetch | None = None) -> Any:
    """What `encode` was given, from what `json.loads` gave. Tensors come back on the CPU.

    Raises:
        CheckpointError: a tag is unknown or malformed; the message names its path.
    """
    return _Decoder(fetch).decode(value, path)


class _Encoder:
    def __init__(self, store: Store | None) -> None:
        self._store = store
        self._known: dict[type, Callable[[Any, str], Any]] = {
            float: lambda value, _: value if math.isfinite(value) else {"$float": repr(value)},
            complex: lambda value, path: {"$complex": self._items([value.real, value.imag], path)},
            bytes: lambda value, _: {"$bytes": _text(value)},
            list: self._items,
            tuple: lambda value, path: {"$tuple": self._items(value, path)},
            torch.Size: lambda value, path: {"$size": self._items(value, path)},
            set: lambda value, path: {"$set": self._items(value, path)},
            frozenset: lambda value, path: {"$frozenset": self._items(value, path)},
            deque: lambda value, path: {"$deque": [value.maxlen, self._items(value, path)]},
            dict: self._dict,
            OrderedDict: lambda value, path: {"$ordered": self._pairs(value, path)},
            Counter: lambda value, path: {"$counter": self._pairs(value, path)},
            torch.dtype: lambda value, _: {"$dtype": name_of(value)},
            torch.device: lambda value, _: {"$device": str(value)},
            Tensor: self._tensor,
            torch.nn.Parameter: self._tensor,
        }

    def encode(self, value: Any, path: str) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind in self._known:
            return self._known[kind](value, path)
        numpy = sys.modules.get("numpy")
        if (
            numpy is not None
            and isinstance(value, (numpy.ndarray, numpy.generic))
            and value.dtype.kind in "biufcSUMm"
        ):
            return self._array(value, "$array" if kind is numpy.ndarray else "$scalar")
        raise _refusal(path, f"a {kind.__module__}.{kind.__qualname__} is not plain data")

    def _items(self, values: Any, path: str) -> list[Any]:
        return [self.encode(value, f"{path}[{number}]") for number, value in enumerate(values)]

    def _pairs(self, value: Mapping[Any, Any], path: str) -> list[Any]:
        return [
            [self.encode(key, f"{path} key"), self.encode(item, f"{path}[{key!r}]")]
            for key, item in value.items()
        ]

    def _dict(self, value: dict[Any, Any], path: str) -> Any:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: self.encode(item, f"{path}.{key}") for key, item in value.items()}
        return {"$dict": self._pairs(value, path)}

    def _tensor(self, value: Tensor, path: str) -> Any:
        if value.layout is not torch.strided or value.is_quantized or value.device.type == "meta":
            raise _refusal(path, f"a tensor of layout {value.layout} on {value.device} is not plain data")
        data = value.detach()
        if self._store is not None and data.nbytes > INLINE_BYTES:
            return {"$stored": self._store(path, data)}
        return {"$tensor": [name_of(data.dtype), list(data.shape), _text(bytes_of(data))]}

    def _array(self, value: Any, tag: str) -> Any:
        return {tag: [value.dtype.str, list(value.shape), _text(value.tobytes())]}


class _Decoder:
    def __init__(self, fetch: Fetch | None) -> None:
        self._fetch = fetch
        self._known: dict[str, Callable[[Any, str], Any]] = {
            "$float": lambda body, path: {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}[body],
            "$complex": lambda body, path: complex(*self._items(body, path)),
            "$bytes": lambda body, path: b64decode(body, validate=True),
            "$tuple": lambda body, path: tuple(self._items(body, path)),
            "$size": lambda body, path: torch.Size(self._items(body, path)),
            "$set": lambda body, path: set(self._items(body, path)),
            "$frozenset": lambda body, path: frozenset(self._items(body, path)),
            "$deque": lambda body, path: deque(self._items(body[1], path), maxlen=body[0]),
            "$dict": lambda body, path: dict(self._pairs(body, path)),
            "$ordered": lambda body, path: OrderedDict(self._pairs(body, path)),
            "$counter": lambda body, path: Counter(dict(self._pairs(body, path))),
            "$dtype": lambda body, path: DTYPES[body],
            "$device": lambda body, path: torch.device(body),
            "$tensor": lambda body, path: tensor_from(
                bytearray(b64decode(body[2], validate=True)), DTYPES[body[0]], body[1]
            ),
            "$stored": self._stored,
            "$array": lambda body, path: _array(body).copy(),
            "$scalar": lambda body, path: _array(body)[()],
        }

    def decode(self, value: Any, path: str) -> Any:
        if isinstance(value, list):
            return self._items(value, path)
        if not isinstance(value, dict):
            return value
        tag, body = next(iter(value.items())) if len(value) == 1 else ("", None)
        if not tag.startswith("$"):
            return {key: self.decode(item, f"{path}.{key}") for key, item in value.items()}
        try:
            return self._known[tag](body, path)
        except (KeyError, ValueError, TypeError, IndexError, RuntimeError) as error:
            # Whatever a damaged or crafted body makes of the constructors above.
            raise CheckpointError(f"{path}: {tag} is unknown or malformed ({error})") from error

    def _items(self, body: list[Any], path: str) -> list[Any]:
        return [self.decode(item, f"{path}[{number}]") for number, item in enumerate(body)]

    def _pairs(self, body: list[Any], path: str) -> list[tuple[Any, Any]]:
        return [(self.decode(key, path), self.decode(item, f"{path}[{key!r}]")) for key, item in body]

    def _stored(self, key: str, path: str) -> Tensor:
        if self._fetch is None:
            raise ValueError("there is no data file here")
        return self._fetch(key)


def _refusal(path: str, problem: str) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be stored: {problem}\n"
        "let state_dict() return numbers, text, bytes, tensors, arrays, or tuples, lists, sets, dicts of them"
    )


def _text(data: Any) -> str:
    return b64encode(data).decode("ascii")


def _array(body: Any) -> Any:
    import numpy as np

    dtype = np.dtype(body[0])
    if dtype.kind not in "biufcSUMm":
        raise ValueError(f"dtype {body[0]}")
    return np.frombuffer(b64decode(body[2], validate=True), dtype=dtype).reshape(body[1])

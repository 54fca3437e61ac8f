"""States of random generators, as core stores them and as Accelerate does."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["from_foreign", "to_foreign"]


def from_foreign(states: Mapping[str, Any], here: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """Return the streams of a rank, each as it was there.

    What was not there stays as it is here.
    """
    version, numbers, gauss = states["random_state"]
    name, key, position, has_gauss, cached = states["numpy_random_seed"]
    array = np.asarray(key)
    found = {
        "python": _stream({"$tuple": [version, {"$tuple": list(numbers)}, gauss]}),
        "numpy": _stream(
            {
                "bit_generator": str(name),
                "state": {"key": {"$array": _packed(array)}, "pos": int(position)},
                "has_gauss": int(has_gauss),
                "gauss": float(cached),
            }
        ),
        "torch": states["torch_manual_seed"],
    }
    for device in here.keys() - found.keys():
        if seeds := states.get(f"torch_{device}_manual_seed"):
            found[device] = seeds[rank % len(seeds)]  # one a device of the rank's machine
    return {**here, **found}


def to_foreign(streams: Mapping[str, Tensor], rank: int) -> dict[str, Any]:
    """Entries of Accelerate's `random_states_RANK.pkl` for these streams."""
    version, numbers, gauss = _content(streams["python"])["$tuple"]
    numpy = _content(streams["numpy"])
    found: dict[str, Any] = {
        "random_state": (version, tuple(numbers["$tuple"]), gauss),
        "numpy_random_seed": (
            numpy["bit_generator"],
            _unpacked(*numpy["state"]["key"]["$array"]),
            numpy["state"]["pos"],
            numpy["has_gauss"],
            numpy["gauss"],
        ),
        "torch_manual_seed": streams["torch"],
    }
    for device in streams.keys() - {"python", "numpy", "torch"}:
        found[f"torch_{device}_manual_seed"] = [streams[device]] * (rank + 1)
    return found


def _stream(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _content(stream: Tensor) -> Any:
    return json.loads(bytes(stream.tolist()))


def _packed(array: np.ndarray[Any, Any]) -> list[Any]:
    return [array.dtype.str, list(array.shape), b64encode(array.tobytes()).decode()]


def _unpacked(dtype: str, shape: list[int], text: str) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = np.frombuffer(b64decode(text), dtype=dtype).reshape(shape).copy()
    return found

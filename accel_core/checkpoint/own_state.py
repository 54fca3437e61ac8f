"""State that an optimizer holds beside the state of its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from accel_core.errors import CheckpointError


def own_state(optimizer: Optimizer) -> dict[str, dict[Any, Any]]:
    """Collect the state that `OptimizerState.own` describes.

    Raises:
        CheckpointError: its `state_dict` tells of the parameters' state otherwise than `optimizer.state`.
    """
    held: dict[Any, Any] = optimizer.state  # by parameter, says torch
    state = {key: value for key, value in held.items() if not isinstance(key, Tensor)}
    rest: dict[Any, Any] = {}
    if _has_own_state_dict(optimizer):
        told = optimizer.state_dict()
        rest = {key: value for key, value in told.items() if key not in ("state", "param_groups")}
        _compare(optimizer, told)
    return {"state": state, "rest": rest} if state or rest else {}


def refuse_own_state(optimizer: Optimizer) -> None:
    """Raise if an optimizer keeps other state than that of parameters.

    Raises:
        CheckpointError: the optimizer has other state, by name.
    """
    if odd := [key for held in own_state(optimizer).values() for key in held]:
        raise CheckpointError(
            f"{type(optimizer).__qualname__} keeps {odd[0]!r}, which belongs to no parameter, and the unit's"
            " strategy saves what belongs to parameters only\n"
            "keep it with the parameters, or in an object given to register_for_checkpointing"
        )


def restore_own_state(optimizer: Optimizer, own: Mapping[str, Mapping[Any, Any]]) -> None:
    """Take back what `own_state` gave.

    The state of parameters may be another's afterwards.
    """
    held: dict[Any, Any] = optimizer.state
    for key in [key for key in held if not isinstance(key, Tensor)]:
        del held[key]
    held.update(own.get("state", {}))
    if own.get("rest"):
        optimizer.load_state_dict({**optimizer.state_dict(), **own["rest"]})


def _has_own_state_dict(optimizer: Optimizer) -> bool:
    # A wrapper that never calls torch's `__init__` has none of torch's hooks.
    hooks = [getattr(optimizer, f"_optimizer_state_dict_{when}_hooks", None) for when in ("pre", "post")]
    return any(hooks) or type(optimizer).state_dict is not Optimizer.state_dict


def _compare(optimizer: Optimizer, told: Mapping[str, Any]) -> None:
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    held = dict(optimizer.state)
    expected = {n: held.pop(each) for n, each in enumerate(parameters) if each in held} | held
    found = told.get("state", {})
    odd = [key for key in found.keys() | expected.keys() if not _tells(found.get(key), expected.get(key))]
    groups = told.get("param_groups", [])
    if [{*group} for group in groups] != [{*group} for group in optimizer.param_groups]:
        odd.append("param_groups")
    if odd:
        raise CheckpointError(
            f"{type(optimizer).__qualname__}.state_dict() and the attributes differ in {odd[0]!r};"
            " only the optimizer's `state`, its `param_groups` and further keys can be saved\n"
            "keep the rest under keys of its own in state_dict(), beside 'state' and 'param_groups'"
        )


def _tells(found: Any, expected: Any) -> bool:
    """Tell if an entry is the expected one, maybe with values in inner mappings."""
    if is_same(found, expected):
        return True
    entries = found.items() if isinstance(found, Mapping) else ()
    pairs = [
        pair
        for key, value in entries
        for pair in (value.items() if isinstance(value, Mapping) else [(key, value)])
    ]
    return bool(pairs) and len(pairs) == len(dict(pairs)) and is_same(dict(pairs), expected)


def is_same(one: Any, other: Any) -> bool:
    """Compare two values of state, element by element; nan is the same as nan."""
    if one is other:
        return True
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and type(one) is type(other):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other) or _is_same_with_nan(one, other)
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.array_equal(one, other) or _is_same_with_nan(one, other)
    try:
        return bool(one == other) or bool(one != one and other != other)  # noqa: PLR0124  # nan
    except (RuntimeError, TypeError, ValueError):  # of several elements, beside a number
        return False


def _is_same_with_nan(one: Any, other: Any) -> bool:
    kind = Tensor if isinstance(one, Tensor) else type(one)  # a parameter may be the same as a tensor
    if not isinstance(other, kind) or (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())  # noqa: PLR0124  # nan

"""State that an optimizer holds beside the state of its parameters: it is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from accel_core.checkpoint.same import is_same
from accel_core.errors import CheckpointError


def refuse_own_state(optimizer: Optimizer) -> None:
    """Raise if an optimizer keeps other state than that of parameters, or tells of it otherwise.

    Raises:
        CheckpointError: the optimizer has other state, by name.
    """
    held: dict[Any, Any] = optimizer.state  # by parameter, says torch
    odd = [key for key in held if not isinstance(key, Tensor)]
    if not odd and _has_own_state_dict(optimizer):
        told = optimizer.state_dict()
        odd = [key for key in told if key not in ("state", "param_groups")] or _differing(optimizer, told)
    if odd:
        raise CheckpointError(
            f"{type(optimizer).__qualname__} keeps {odd[0]!r}, which belongs to no parameter, or which its"
            " state_dict() does not tell as its attributes have it: it would not be saved\n"
            "keep it with the parameters, or in an object given to register_for_checkpointing"
        )


def _has_own_state_dict(optimizer: Optimizer) -> bool:
    # A wrapper that never calls torch's `__init__` has none of torch's hooks.
    hooks = [getattr(optimizer, f"_optimizer_state_dict_{when}_hooks", None) for when in ("pre", "post")]
    return any(hooks) or type(optimizer).state_dict is not Optimizer.state_dict


def _differing(optimizer: Optimizer, told: Mapping[str, Any]) -> list[Any]:
    """Return the numbers of parameters whose state is told otherwise than it is kept."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    expected = {n: optimizer.state[each] for n, each in enumerate(parameters) if each in optimizer.state}
    found = told.get("state", {})
    odd: list[Any] = [
        key for key in found.keys() | expected.keys() if not _tells(found.get(key), expected.get(key))
    ]
    if [{*group} for group in told.get("param_groups", ())] != [{*group} for group in optimizer.param_groups]:
        odd.append("param_groups")
    return odd


def _tells(found: Any, expected: Any) -> bool:
    """Tell if an entry is the expected one, maybe with values in inner mappings."""
    if is_same(found, expected):
        return True
    pairs = [
        pair
        for key, value in (found.items() if isinstance(found, Mapping) else ())
        for pair in (value.items() if isinstance(value, Mapping) else [(key, value)])
    ]
    return bool(pairs) and len(pairs) == len(dict(pairs)) and is_same(dict(pairs), expected)

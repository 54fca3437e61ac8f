"""State that an optimizer holds beside the state of its parameters: it is refused by name."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from accel_core.errors import CheckpointError


def refuse_own_state(optimizer: Optimizer) -> None:
    """Raise if an optimizer keeps other state than that of its parameters and groups.

    Raises:
        CheckpointError: the optimizer has other state, by name.
    """
    held: dict[Any, Any] = optimizer.state  # by parameter, says torch
    odd = [key for key in held if not isinstance(key, Tensor)]
    if not odd and _has_own_state_dict(optimizer):
        odd = [key for key in optimizer.state_dict() if key not in ("state", "param_groups")]
    if odd:
        raise CheckpointError(
            f"{type(optimizer).__qualname__} keeps {odd[0]!r}, which belongs to no parameter: it would not be"
            " saved\nkeep it with the parameters, or in an object given to register_for_checkpointing"
        )


def _has_own_state_dict(optimizer: Optimizer) -> bool:
    # A wrapper that never calls torch's `__init__` has none of torch's hooks.
    hooks = [getattr(optimizer, f"_optimizer_state_dict_{when}_hooks", None) for when in ("pre", "post")]
    return any(hooks) or type(optimizer).state_dict is not Optimizer.state_dict

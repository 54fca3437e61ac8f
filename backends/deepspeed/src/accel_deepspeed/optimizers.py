"""Optimizers that cannot step flat pieces of parameters, as DeepSpeed needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["unserved"]

_WHOLE: Final = (
    *("adafactor", "adammini", "apollo", "came", "dion", "galore", "kfac", "kron", "lamb", "lars", "muon"),
    *("novograd", "psgd", "scion", "shampoo", "sm3", "soap"),
)
"""Parts of names of optimizers that step an element by its whole parameter."""


def unserved(optimizer: Optimizer, *, flat: bool) -> str | None:
    """Reason why the optimizer would go wrong, or None.

    flat: parameters are laid end to end.
    """
    name = type(optimizer).__name__
    if name == "LBFGS":
        return (
            "LBFGS evaluates the loss several times a step; DeepSpeed's engine cannot\n"
            "use an optimizer that needs no closure, such as AdamW, or strategy ddp"
        )
    if flat and _is_named(optimizer):
        return (
            f"{name} needs whole parameters, and DeepSpeed steps them end to end, each rank a range\n"
            "use an optimizer that steps element by element, such as AdamW, or strategy ddp; if this"
            f" {name} does, set its attribute: optimizer.elementwise = True"
        )
    return None


def _is_named(optimizer: Optimizer) -> bool:
    """Return True for a known name, unless the optimizer says how it steps."""
    kinds = [kind.__name__.lower().replace("_", "") for kind in type(optimizer).__mro__]
    return not hasattr(optimizer, "elementwise") and any(word in kind for word in _WHOLE for kind in kinds)

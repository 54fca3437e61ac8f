"""Classes that modules of the user take on, and marks of modules that other ranks run.

Lowest of the rooms: pipelines and experts write these marks, and sharding reads them.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

__all__ = ["absent", "become", "forward_of", "has_become", "mark_absent"]


def become(module: nn.Module, first: type, **attributes: Any) -> None:
    """Put a class before the module's own class, as torch's `fully_shard` does. The name stays."""
    kind: type = type(module)
    module.__dict__.setdefault("_own_class", kind)
    module.__class__ = _combined(first, kind)
    module.__dict__.update(attributes)


@cache
def _combined(first: type, kind: type) -> type:
    # One class for all modules of a kind: regional compilation looks for lists of blocks of one class.
    return type(kind.__name__, (first, kind), {"__module__": kind.__module__})


def has_become(model: nn.Module) -> bool:
    """Return True if an earlier prepare has given the model, or a part of it, another class."""
    return any("_own_class" in module.__dict__ for module in model.modules())


def forward_of(model: nn.Module) -> object:
    """Return the forward of the user's class; None if the model has a forward of its own."""
    own: Any = model.__dict__.get("_own_class", type(model))
    return None if "forward" in model.__dict__ else own.forward


def mark_absent(module: nn.Module) -> None:
    """Mark a module as one that another rank runs."""
    module.__dict__["_absent"] = True


def absent(model: nn.Module) -> list[nn.Module]:
    """Return the modules that other ranks run. They may share weights with modules of this rank."""
    return [module for module in model.modules() if "_absent" in module.__dict__]

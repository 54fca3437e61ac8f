"""`accelerate.utils`: each name from the module that has it, loaded when it is asked for (PEP 562)."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from accel_compat.refusing import inventory

_ALONE = {
    "ParallelismConfig": "accelerate.parallelism_config",
    "is_ipex_available": "accelerate.utils.imports",  # of versions before 1.15
    "write_basic_config": "accelerate.commands.config.default",
}


def _home(name: str) -> str | None:
    if name in _ALONE:
        return _ALONE[name]
    modules = (module for module in inventory() if module.startswith("accelerate.utils."))
    return next((module for module in modules if name in inventory()[module]), None)


def __getattr__(name: str) -> Any:
    if f"accelerate.utils.{name}" in inventory():
        return import_module(f"accelerate.utils.{name}")
    home = _home(name) if name in _ALONE or name in inventory()["accelerate.utils"] else None
    if home is None:
        raise AttributeError(f"module 'accelerate.utils' has no attribute {name!r}", name=name)
    found = globals()[name] = getattr(import_module(home), name)
    return found


def __dir__() -> list[str]:
    return sorted({*inventory()["accelerate.utils"], *_ALONE})


__all__ = [name for name in inventory()["accelerate.utils"] if not name.startswith("_")]  # for import *

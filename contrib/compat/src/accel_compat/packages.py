"""Packages of ours, each of which may not be installed."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

from accel_core import PluginError, install_hint

_IN_CONTRIB: Final = ("big-models", "bitsandbytes", "context-parallel", "trackers")


def load(path: str, wanted: str) -> Any:
    """Import what `module:name` names, of a package that may not be installed."""
    module, _, name = path.partition(":")
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        distribution, package = module.replace("_", "-"), module.removeprefix("accel_").replace("_", "-")
        folder = f"contrib/{package}" if package in _IN_CONTRIB else f"backends/{package}"
        raise PluginError(
            f"{wanted} needs {distribution}, which is not installed\n{install_hint(folder)}",
            distribution=distribution,
        ) from error

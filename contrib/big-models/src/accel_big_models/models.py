"""Models without memory: of transformers, of a function, or of a checkpoint."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel_big_models.checkpoints import open_checkpoint
from accel_big_models.empty import empty_weights
from accel_core import CheckpointError, ConfigError

__all__ = ["empty_model"]


def empty_model(name: str, *, trust_remote_code: bool = False) -> nn.Module:
    """Build a model on the meta device.

    Args:
        name: a folder with the config.json of transformers or the name of a model on the hub,
            `module:function` (the function takes nothing, and returns a model), or a checkpoint that
            `load` reads.
        trust_remote_code: whether code that comes with a model of transformers may run.

    Raises:
        ConfigError: it is none of these, or transformers is not installed or cannot build it.
    """
    path = Path(name)
    module, colon, function = name.partition(":")
    if colon and not path.exists():
        return _of_function(module, function)
    if _is_of_transformers(path / "config.json"):
        return _of_transformers(name, trust_remote_code=trust_remote_code)
    if path.exists():
        return _of_checkpoint(path)
    if name.startswith((".", os.sep, "~")) or name.count("/") > 1:
        raise ConfigError(f"MODEL {name}: there is no such folder or file\n{_KINDS}")
    return _of_transformers(name, trust_remote_code=trust_remote_code)


_KINDS = (
    "give a folder with config.json, a name on the hub, MODULE:FUNCTION, or a checkpoint: a file of weights,"
    " an index, or a folder"
)


def _is_of_transformers(config: Path) -> bool:
    try:
        known = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(known, dict) and bool({"model_type", "architectures", "auto_map"} & known.keys())


def _of_function(module: str, function: str) -> nn.Module:
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` has it
    try:
        build: Any = getattr(import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"MODEL {module}:{function}: {error}\n{_KINDS}") from error
    if not callable(build):
        raise ConfigError(
            f"MODEL {module}:{function}: it is a {type(build).__name__}\n"
            "name a function that takes nothing and returns a torch.nn.Module"
        )
    with empty_weights():
        model = _built(f"MODEL {module}:{function}", build)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"MODEL {module}:{function}: it returned a {type(model).__name__}\n"
            "name a function that takes nothing and returns a torch.nn.Module"
        )
    return model


def _built(name: str, build: Callable[[], Any]) -> Any:
    try:
        return build()
    except Exception as error:  # of the user's code, of any kind
        frames = error.__traceback__ and error.__traceback__.tb_next  # without the one here
        told = "".join(traceback.format_exception(type(error), error, frames))
        raise ConfigError(
            f"{name}: it raised an error\n{told}"
            "name a function that takes nothing and returns a torch.nn.Module"
        ) from error


def _of_transformers(name: str, *, trust_remote_code: bool) -> nn.Module:
    try:
        transformers: Any = import_module("transformers")
    except ImportError as error:
        raise ConfigError(
            f"MODEL {name}: models of transformers need transformers, which is not installed\n"
            "pip install transformers"
        ) from error
    try:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        classes: list[Any] = [getattr(transformers, each, None) for each in config.architectures or ()]
        kind = next((each for each in classes if each is not None), transformers.AutoModel)
        with empty_weights():
            if kind is transformers.AutoModel or getattr(config, "auto_map", None):
                model = _auto(transformers, config).from_config(config, trust_remote_code=trust_remote_code)
            else:
                model = kind._from_config(config)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise ConfigError(
            f"MODEL {name}: transformers cannot build it: {str(error).strip().splitlines()[0]}\n{_KINDS}"
        ) from error
    model.tie_weights()
    return model  # type: ignore[no-any-return]


def _auto(transformers: Any, config: Any) -> Any:
    """Return the class that remote code registers itself under, else AutoModel."""
    named = [key for key in getattr(config, "auto_map", None) or () if key.startswith("AutoModelFor")]
    return getattr(transformers, named[0]) if named else transformers.AutoModel


def _of_checkpoint(path: Path) -> nn.Module:
    """Build modules as the weights' names say; each has its shape and dtype."""
    try:
        sources = open_checkpoint(path)
    except CheckpointError as error:
        raise ConfigError(f"MODEL {path}: {error}\n{_KINDS}") from error
    parents = {name[:end] for name in sources for end, letter in enumerate(name) if letter == "."}
    model, made = nn.Module(), {}
    shared: dict[int, torch.Tensor] = {}
    for parent in sorted(parents, key=lambda name: name.count(".")):
        keys = {other.rpartition(".")[2] for other in parents if other.rpartition(".")[0] == parent}
        made[parent] = nn.ModuleList() if keys and all(map(str.isdecimal, keys)) else nn.Module()
        home, _, key = parent.rpartition(".")
        (made[home] if home else model).add_module(key, made[parent])
    for name, source in sources.items():
        tensor = shared.setdefault(id(source), torch.empty(source.shape, dtype=source.dtype, device="meta"))
        home, _, key = name.rpartition(".")
        where = made[home] if home else model
        if tensor.is_floating_point():
            weight = shared[id(source)] = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor)
            where.register_parameter(key, weight)
        else:
            where.register_buffer(key, tensor)
    return model

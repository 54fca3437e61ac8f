"""Names of Accelerate that are not served: they can be imported, but not called."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn

from accel_core import AccelError, install_hint

MEGATRON: Final = "accel-megatron takes plain models, optimizers and dataloaders, and makes the rest itself"
REASONS: Final[Mapping[str, str]] = {
    "accelerate.utils.bnb": "accel-bitsandbytes keeps quantized weights away by itself",
    "accelerate.utils.transformer_engine": "accel-transformer-engine converts models in prepare",
    "accelerate.utils.megatron_lm": MEGATRON,
    "accelerate.utils.launch": "the launcher of accel-core starts the workers",
    "accelerate.checkpointing": "accelerator.save_state and load_state do it, in accel-core's format",
    "accelerate.utils.fsdp_utils": "accelerator.save_state and save_model write what accel-fsdp shards",
    "accelerate.commands": "the command line here is `accel`",
    "accelerate.commands.estimate": "models are built from their configs, without asking the hub about them",
}
"""Module -> why what it has besides is not served. The longest that fits counts."""


_EXPORTING: Final = ("accelerate", "accelerate.utils")
"""Modules that only export names of others."""
_FOLDERS: Final = ("accelerate.commands",)
"""Packages without names."""

PACKAGES: Final[Mapping[str, str]] = {
    "DeepSpeedPlugin": "backends/deepspeed",
    "DummyOptim": "backends/deepspeed",
    "DummyScheduler": "backends/deepspeed",
    "FullyShardedDataParallelPlugin": "backends/fsdp",
    "MegatronLMDummyScheduler": "backends/megatron",
    "MegatronLMPlugin": "backends/megatron",
    "TorchTensorParallelPlugin": "backends/fsdp",
}
"""Name that works if a package of ours is installed -> the package's folder."""


class NotServedError(AccelError, NotImplementedError):
    """A name of Accelerate was called that accel-compat imports but does not serve."""


@cache
def inventory() -> Mapping[str, Mapping[str, str]]:
    """Return module of Accelerate 1.15 -> its names -> class, function or value."""
    found: Mapping[str, Mapping[str, str]] = json.loads(Path(__file__).with_name("names.json").read_text())
    return found


def why(module: str, name: str) -> str:
    """Give the reason why a name is not served."""
    if module in _EXPORTING:
        homes = (home for home in inventory() if home in REASONS and name in inventory()[home])
        module = next(homes, module)
    if name in PACKAGES:
        return f"it needs a package; {install_hint(PACKAGES[name])}"
    if "megatron" in name.lower():
        return MEGATRON
    fitting = [start for start in REASONS if module == start or module.startswith(start + ".")]
    return REASONS[max(fitting, key=len)] if fitting else "it is internal to Accelerate"


def names_of(module: str) -> dict[str, Any]:
    """Return `__getattr__`, `__dir__` and `__all__` of a module of Accelerate.

    They serve the names in the module's inventory.

    A name that the module does not serve itself is taken from another module that does, as programs also
    import names from modules of Accelerate that only import them. What no module serves is refused when it
    is called.
    """
    names = inventory().get(module, {})

    def look_up(name: str) -> Any:
        if f"{module}.{name}" in (*inventory(), *_FOLDERS):
            return import_module(f"{module}.{name}")
        homes = [home for home in inventory() if name in inventory()[home] and home not in _EXPORTING]
        if not homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}", name=name)
        # A class or function of another module may share its name with one that this module defines.
        if module not in homes or names[name] == "value":
            for home in homes:
                served = vars(import_module(home))
                if home != module and name in served:
                    return served[name]
        return unserved(module if module in homes else homes[0], name)

    public = sorted(name for name in names if not name.startswith("_"))
    if not public:
        return {"__getattr__": look_up}
    return {"__getattr__": look_up, "__dir__": lambda: public, "__all__": public}


def unserved(module: str, name: str) -> Any:
    """Return an importable name that raises NotServedError when called."""
    if inventory()[module][name] == "class":
        return _Refusing(name, (), {"__module__": module})
    return _refuser(module, name)


def of_package(package: str, module: str, name: str) -> Any:
    """Return a package's class; without the package, one that refuses to be made."""
    try:
        return getattr(import_module(package), name)
    except ModuleNotFoundError:
        return unserved(module, name)


def _refuse(module: str, name: str) -> NoReturn:
    reason = why(module, name)
    escape = "leave the call out, or run the program on Accelerate itself"
    raise NotServedError(
        f"{module}.{name} of Accelerate is not served by accel-compat: {reason}\n{_caller()}{escape}"
    )


def _caller() -> str:
    """Return the line that called, in the program or a library of its own."""
    frame: FrameType | None = sys._getframe(1)
    here = str(Path(__file__).parent)
    while frame is not None and frame.f_code.co_filename.startswith(here):
        frame = frame.f_back
    return f"called by {frame.f_code.co_filename}:{frame.f_lineno}\n" if frame is not None else ""


class _Refusing(type):
    """Of classes that nothing is an instance of, because they cannot be called."""

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse(cls.__module__, cls.__name__)


def _refuser(module: str, name: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        _refuse(module, name)

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__module__ = module
    return refuse

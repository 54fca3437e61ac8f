"""Accelerate's constructor arguments and variables, translated to accel-core's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

from attrs import define

from accel_compat.accelerator.strategies import Chosen, chosen_strategies, use_run_accumulation
from accel_compat.configs.enums import PrecisionType
from accel_compat.configs.handlers import (
    GradientAccumulationPlugin,
    KwargsHandler,
    TorchDynamoPlugin,
)
from accel_compat.configs.low_precision import AORecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
from accel_compat.configs.translation import ours_of
from accel_compat.environment.variables import parse_flag_from_env, parse_number_from_env
from accel_compat.notices import warn_once
from accel_compat.runs import affinity_preset, kind_of
from accel_compat.trackers.registry import resolve_trackers
from accel_core import plugin_status

STATE_PLUGINS: Final = (
    "dynamo_plugin",
    "fsdp_plugin",
    "megatron_lm_plugin",
    "torch_tp_plugin",
    "parallelism_config",
)
HANDLERS: Final[Mapping[str, str]] = {
    "AutocastKwargs": "autocast_handler",
    "DistributedDataParallelKwargs": "ddp_handler",
    "GradScalerKwargs": "scaler_handler",
    "InitProcessGroupKwargs": "init_handler",
    "ProfileKwargs": "profile_handler",
    "AORecipeKwargs": "ao_recipe_handler",
    "TERecipeKwargs": "te_recipe_handler",
    "MSAMPRecipeKwargs": "msamp_recipe_handler",
    "FP8RecipeKwargs": "fp8_recipe_handler",
}
"""Class of a kwargs handler -> the attribute under which an Accelerator keeps it."""
_RECIPES: Final = tuple(name for name in HANDLERS if "Recipe" in name)
_BACKENDS: Final = {"ao": AORecipeKwargs, "te": TERecipeKwargs, "msamp": MSAMPRecipeKwargs}
BACKEND: Final = "ACCELERATE_FP8_BACKEND"
MODE: Final = "ACCELERATE_MIXED_PRECISION"
STEPS: Final = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
UNSAID: Final = {
    "device_placement": True,
    "step_scheduler_with_optimizer": True,
    "split_batches": False,
    "cpu": False,
    "gradient_accumulation_steps": 1,
}


@define
class Asked:
    """Translated arguments."""

    core: dict[str, Any]
    kept: dict[str, Any]
    accumulation: Any
    deepspeed: Any
    precision: str | None = None
    """The precision that the recipe for fp8 belongs to."""

    def spoken(self) -> dict[str, Any]:
        """Return the arguments that differ from Accelerate's defaults.

        A file wins over the others.
        """
        said = {name: value for name, value in self.core.items() if value != UNSAID.get(name)}
        return said | ({} if self.precision is None else {"mixed_precision": self.precision})


def read(given: dict[str, Any]) -> Asked:
    """Translate the arguments, as Accelerate 1.15 would read them.

    Raises:
        ValueError: they contradict each other, as there.
        NotServedError: what is not served was asked for; the message has the reason.
    """
    if given["dynamo_plugin"] is not None and given["dynamo_backend"] is not None:
        raise ValueError(
            "You cannot pass in both `dynamo_plugin` and `dynamo_backend`, please only pass in one."
        )
    kept: dict[str, Any] = dict.fromkeys(HANDLERS.values()) | _handlers(given["kwargs_handlers"])
    accumulation = _accumulation(given)
    dynamo = given["dynamo_plugin"] or TorchDynamoPlugin(backend=given["dynamo_backend"])
    compiled = given["dynamo_plugin"] or given["dynamo_backend"]
    chosen = chosen_strategies(given)
    asked, by_variable = _precision(given["mixed_precision"]), _precision_of_variable()
    is_fp8 = (asked or by_variable) == "fp8"
    handlers = _translated(chosen, chosen.usable(given["kwargs_handlers"]), is_fp8=is_fp8)
    if accumulation is not None:
        use_run_accumulation(chosen.deepspeed, accumulation.num_steps)
    kept |= {name: given[name] for name in STATE_PLUGINS}
    kept |= {
        "dynamo_plugin": dynamo,
        "fsdp_plugin": chosen.fsdp,
        "megatron_lm_plugin": chosen.megatron,
        "has_lomo_optimizer": False,
        "delayed_fp8_autocast": False,
        "has_fp8_handler": any(kept[name] for name in HANDLERS.values() if "recipe" in name),
    }
    alike = {name: given[name] for name in ("device_placement", "step_scheduler_with_optimizer")}
    kept |= {**alike, **{name: given[name] for name in ("dataloader_config", "rng_types")}}
    core = {**alike, "project_dir": given["project_dir"]}
    core |= {
        "split_batches": bool(given["split_batches"]),
        "mixed_precision": asked,
        "cpu": given["cpu"],
        "dataloader_config": ours_of(given["dataloader_config"]),
        "rng_types": None if given["rng_types"] is None else [str(kind) for kind in given["rng_types"]],
        "log_with": _trackers(given),
        "project_config": ours_of(given["project_config"]),
        "gradient_accumulation_steps": 1,
        "gradient_accumulation_plugin": ours_of(accumulation),
        "dynamo_plugin": ours_of(dynamo) if compiled else None,
        "kwargs_handlers": handlers,
        **chosen.core(),
    }
    core["presets"] = {**core.get("presets", {}), **_variables(None if compiled else dynamo)}
    by_te = is_fp8 and any(type(each).__name__ == "TransformerEngineConfig" for each in handlers)
    return Asked(core, kept, accumulation, chosen.deepspeed, "fp8-te" if by_te else None)


def _variables(dynamo: TorchDynamoPlugin | None) -> dict[str, tuple[Any, str]]:
    """Read Accelerate's variables; a file, a flag or an argument wins over them."""
    read = os.environ.get
    compiled = {
        f"compile.{name}": (value, f"variable ACCELERATE_DYNAMO_{name.upper()}")
        for name, value in ({} if dynamo is None else dynamo.translation()).items()
    }
    named: dict[str, tuple[str, Any]] = {
        "mixed_precision": (MODE, _precision_of_variable()),
        "gradient_accumulation_steps": (STEPS, _steps_of_variable()),
        "device": ("ACCELERATE_TORCH_DEVICE", kind_of(read("ACCELERATE_TORCH_DEVICE", "")) or None),
    }
    if parse_flag_from_env("ACCELERATE_USE_CPU"):
        named["device"] = ("ACCELERATE_USE_CPU", "cpu")
    given = {path: (value, f"variable {name}") for path, (name, value) in named.items() if value is not None}
    return {**compiled, **given, **affinity_preset()}


def _precision(asked: Any, by: str = "") -> str | None:
    if asked is None:
        return None
    word = str(getattr(asked, "value", asked)).lower()
    if word not in PrecisionType.list():
        raise ValueError(f"{by}Unknown mixed_precision mode: {word}. Choose between {PrecisionType.list()}")
    return word


def _precision_of_variable() -> str | None:
    return _precision(os.environ.get(MODE), f"the variable {MODE}: ")


def _translated(chosen: Chosen, handlers: list[Any], *, is_fp8: bool) -> list[Any]:
    """Translate the handlers.

    fp8 without a recipe takes that of ACCELERATE_FP8_BACKEND; without it torchao's, and where that cannot be
    used Transformer Engine's.
    """
    if is_fp8 and not any(type(each).__name__ in _RECIPES for each in handlers):
        by_te = plugin_status("fp8-torchao") != "available" and plugin_status("fp8-te") == "available"
        word = os.environ.get(BACKEND, "te" if by_te else "ao").lower()
        if word not in _BACKENDS:
            raise ValueError(f"the variable {BACKEND}: {word} is not one of {', '.join(_BACKENDS)}")
        handlers.append(_BACKENDS[word]())
    fsdp2 = chosen.fsdp is not None and chosen.fsdp.fsdp_version == 2
    return [
        each.under(fsdp2=fsdp2) if isinstance(each, AORecipeKwargs) else ours_of(each) for each in handlers
    ]


def _accumulation(given: Mapping[str, Any]) -> Any:
    """Return the gradient accumulation plugin that was asked for, or None.

    The variable wins over the argument, as in Accelerate.
    """
    plugin, steps = given["gradient_accumulation_plugin"], given["gradient_accumulation_steps"]
    if plugin is not None:
        if steps != 1:
            raise ValueError(
                "You can only pass one of `gradient_accumulation_steps` and `gradient_accumulation_plugin`."
                " Please only pass in the created `GradientAccumulationPlugin` object."
            )
        return plugin
    if steps == 1:
        return None
    found = _steps_of_variable() or steps
    if found != steps:
        warn_once(f"gradient_accumulation_steps is {steps} in the program, {found} by {STEPS}, which is used")
    return GradientAccumulationPlugin(num_steps=found)


def _steps_of_variable() -> int | None:
    """Return the steps that the variable says, or None.

    Raises:
        ValueError: they are less than 1.
    """
    steps: int | None = parse_number_from_env(STEPS)
    if steps is not None and steps < 1:
        raise ValueError(f"the variable {STEPS} is {steps}\nset it to 1 or more, or unset it")
    return steps


def _handlers(handlers: Any) -> dict[str, Any]:
    """Return the attributes under which the handlers are kept."""
    kept: dict[str, Any] = {}
    for handler in handlers or ():
        if not isinstance(handler, KwargsHandler):
            raise ValueError(
                f"Unsupported kwargs handler passed: {handler}, must be one that inherits `KwargsHandler`."
            )
        name = HANDLERS.get(type(handler).__name__)
        if name is None:
            raise ValueError(f"Unsupported kwargs handler passed: {type(handler).__name__}")
        if name in kept:
            raise ValueError(f"You can only pass one `{type(handler).__name__}` in `kwargs_handlers`.")
        kept[name] = handler
    return kept


def _trackers(given: Mapping[str, Any]) -> Any:
    asked, config = given["log_with"], given["project_config"]
    if asked is None:
        return None
    several = asked if isinstance(asked, (list, tuple)) else [asked]
    return list(resolve_trackers(several, getattr(config, "logging_dir", None) or given["project_dir"]))

"""Precision `fp8-te` in megatron-core's own layers of transformer-engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import attrs

from accel_core import ConfigError
from accel_megatron import adapters
from accel_megatron.layers import has_transformer_engine
from accel_megatron.library import quiet

if TYPE_CHECKING:
    from torch import nn

    from accel_core import Run

__all__ = ["PRECISION", "fields", "of_config", "of_model", "refused", "require_layers"]

PRECISION: Final = "fp8-te"
_SERVED: Final = ("fp32", "bf16", "fp16", PRECISION)
_HISTORY: Final = ("margin", "amax_history_len", "amax_compute_algo")
_OPTIONS: Final = ("recipe", "format", "in_evaluation", *_HISTORY)
"""Options of section fp8_te that megatron-core's layers follow."""
_CLASSES: Final = {
    "delayed": "DelayedScaling",
    "current": "Float8CurrentScaling",
    "block": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
}
_FIELDS: Final = {
    "DelayedScaling": {"fp8_recipe": "delayed", "fp8": "hybrid"},
    "Float8CurrentScaling": {"fp8_recipe": "tensorwise", "fp8": "hybrid"},
    "Float8BlockScaling": {"fp8_recipe": "blockwise", "fp8": "e4m3"},
    "MXFP8BlockScaling": {"fp8_recipe": "mxfp8", "fp8": "e4m3"},
}
"""Recipe of transformer-engine -> fields of TransformerConfig, in its format."""
_WITHOUT_HISTORY: Final = (
    "num_moe_experts",
    "fp8_dot_product_attention",
    "fp8_multi_head_attention",
    "tp_only_amax_red",
)
"""Fields with which the state of delayed scaling is not in checkpoints."""


def refused(run: Run) -> Iterator[str]:
    """Reasons why megatron-core does not compute in the run's precision."""
    name = run.stack.precision.name
    if name not in _SERVED:
        yield (
            f"megatron: precision {name} changes layers of the model, and megatron-core trains layers of its"
            f" own\nset mixed_precision: {PRECISION} (transformer-engine's float8), bf16 or fp16"
        )
    elif name == PRECISION and not has_transformer_engine():
        yield (
            "megatron: megatron-core finds no transformer-engine, whose layers compute in float8\n"
            "install transformer-engine[pytorch], or set mixed_precision: bf16"
        )
    elif name == PRECISION:
        yield from _of_options(run)


def _of_options(run: Run) -> Iterator[str]:
    """Reasons why megatron-core's layers do not follow section fp8_te."""
    options: Any = run.configs[PRECISION]
    fields = () if options is None else attrs.fields(type(options))
    odd = [
        f"fp8_te.{each.name}"
        for each in fields
        if each.name not in _OPTIONS and getattr(options, each.name) != each.default
    ]
    if odd:
        yield (
            f"megatron: megatron-core's layers have no {', '.join(odd)}\n"
            "leave it out, or use strategy fsdp or ddp"
        )
    recipe = _recipe(run)
    if recipe not in _FIELDS:
        yield (
            f"megatron: recipe {recipe} of section fp8_te is not served\n"
            "set fp8_te.recipe: delayed, current, block or mxfp8"
        )


def of_model(run: Run, model: nn.Module) -> Iterator[str]:
    """Reason why a model would not compute in float8."""
    own = hasattr(model, "chunks") or not adapters.why_unsupported(model)
    if run.stack.precision.name == PRECISION and not own:
        yield (
            f"megatron: {type(model).__name__} runs its own forward, and only megatron-core's layers compute"
            " in float8 here\nuse strategy fsdp or ddp, or a model of accel_megatron.build_model"
        )


def fields(run: Run) -> Mapping[str, Any]:
    """Return the fields of TransformerConfig for the run's precision."""
    if run.stack.precision.name != PRECISION:
        return {}
    recipe = _recipe(run)
    chosen: dict[str, Any] = {**_FIELDS[recipe]}
    options: Any = run.configs[PRECISION]
    form = getattr(options, "format", None)
    if form is not None:
        chosen["fp8"] = form.lower()
    if recipe == "DelayedScaling":  # megatron-core's own defaults are not the library's
        with quiet():
            usual = import_module("transformer_engine.common.recipe").DelayedScaling()
        for name in _HISTORY:
            asked = getattr(options, name, None)
            chosen[f"fp8_{name}"] = getattr(usual, name) if asked is None else asked
    return chosen


def of_config(run: Run, config: Any) -> str | None:
    """Return why a TransformerConfig with float8 is not served, or None."""
    if config.fp8_param:
        return (
            "megatron: fp8_param keeps weights in float8, and checkpoints here do not hold such\nleave it out"
        )
    if not config.fp8 or config.fp8_recipe != "delayed":
        return None
    if run.stack.precision.name != PRECISION:
        return (
            "megatron: checkpoints hold scales and histories of delayed scaling with mixed_precision: fp8-te"
            " alone\n"
            "set that, or fp8_recipe: tensorwise (blockwise, mxfp8)"
        )
    odd = [name for name in _WITHOUT_HISTORY if getattr(config, name, None)]
    if odd:
        return (
            f"megatron: with {', '.join(odd)} checkpoints do not hold all scales and histories of delayed"
            " scaling\n"
            "leave it out, or set fp8_te.recipe: current (block, mxfp8)"
        )
    return None


def require_layers(run: Run, chunks: Sequence[nn.Module]) -> None:
    """Raise ConfigError if this rank has layers, and none of transformer-engine."""
    if run.stack.precision.name != PRECISION:
        return
    with quiet():
        from megatron.core.transformer import TransformerLayer
    modules = [module for chunk in chunks for module in chunk.modules()]
    has_layers = any(isinstance(module, TransformerLayer) for module in modules)
    if has_layers and not any(isinstance(getattr(module, "fp8_meta", None), dict) for module in modules):
        raise ConfigError(
            "megatron: no layer of this model is transformer-engine's, so none would compute in float8\n"
            "set mixed_precision: bf16, or build layers of its spec: accel_megatron.build_model"
        )


def _recipe(run: Run) -> str:
    """Return the name of the recipe's class; of one that is not served, its word."""
    options: Any = run.configs[PRECISION]
    word: str = getattr(options, "recipe", "auto")
    if word == "auto" and getattr(options, "asks_for_delayed", False):
        word = "delayed"
    if word == "auto":
        with quiet():
            te: Any = import_module("transformer_engine.pytorch")
        return type(te.get_default_recipe()).__name__
    return _CLASSES.get(word, word)

"""Models of transformers and their megatron-core twins."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from accel_core import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from accel_megatron.twins.twin import Twin

__all__ = ["twin_of", "why_not"]

_KNOWN: Final = {
    "BertForMaskedLM": "bert:Bert",
    "GPT2LMHeadModel": "gpt2:Gpt2",
    "LlamaForCausalLM": "llama:Llama",
}
"""Class of the model -> where its twin is."""


def why_not(model: nn.Module) -> str | None:
    """Why the model has no twin, if it has none."""
    name = type(model).__name__
    if name not in _KNOWN or not type(model).__module__.startswith("transformers."):
        return (
            f"{name} has no twin in megatron-core here; known of transformers: {', '.join(_KNOWN)}\n"
            "give one of those, build megatron-core's model yourself (accel_megatron.build_model), or leave"
            " tp_degree and pp_degree at 1"
        )
    found = _kind(model).unlike(model.config)
    if found is None:
        return None
    return (
        f"{name} with {found} has no equal in megatron-core\n"
        "leave that at its default, build megatron-core's model yourself (accel_megatron.build_model), or"
        " leave tp_degree and pp_degree at 1"
    )


def twin_of(model: nn.Module) -> Twin:
    """Raises ConfigError if the model has no twin."""
    if reason := why_not(model):
        raise ConfigError(reason)
    twin: Twin = _kind(model)(model.config)
    return twin


def _kind(model: nn.Module) -> Any:
    module, _, name = _KNOWN[type(model).__name__].partition(":")
    return getattr(import_module(f"accel_megatron.twins.{module}"), name)

"""Adapters that give models of transformers megatron-core's form."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from accel_core import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from accel_megatron.adapters.adapter import Adapter

__all__ = ["adapter_of", "why_unsupported"]

_KNOWN: Final = {
    "BertForMaskedLM": "bert:Bert",
    "GPT2LMHeadModel": "gpt2:Gpt2",
    "LlamaForCausalLM": "llama:Llama",
}
"""Class of the model -> module and class of its adapter."""


def why_unsupported(model: nn.Module) -> str | None:
    """Reason why the model has no adapter; None if it has one."""
    name = type(model).__name__
    if name not in _KNOWN or not type(model).__module__.startswith("transformers."):
        return (
            f"{name} has no adapter to megatron-core; there are adapters for {', '.join(_KNOWN)}\n"
            "give one of those, build megatron-core's model yourself (accel_megatron.build_model), or leave"
            " parallelism.tp and parallelism.pp at 1"
        )
    found = _kind(model).unsupported_setting(model.config)
    if found is None:
        return None
    return (
        f"{name} with {found} cannot be computed by megatron-core\n"
        "leave that at its default, build megatron-core's model yourself (accel_megatron.build_model), or"
        " leave parallelism.tp and parallelism.pp at 1"
    )


def adapter_of(model: nn.Module) -> Adapter:
    """Return the adapter of a model, or raise ConfigError."""
    if reason := why_unsupported(model):
        raise ConfigError(reason)
    adapter: Adapter = _kind(model)(model.config)
    return adapter


def _kind(model: nn.Module) -> Any:
    module, _, name = _KNOWN[type(model).__name__].partition(":")
    return getattr(import_module(f"accel_megatron.adapters.{module}"), name)

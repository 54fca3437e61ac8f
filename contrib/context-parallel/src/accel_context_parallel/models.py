"""What transformers' models are asked for: causal attention without masks, which would be a rank's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel_core import AccelError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["attend_causally"]


def attend_causally(model: nn.Module) -> None:
    """Let each `self_attn` be causal instead of masked; other models stay as they are.

    Raises:
        AccelError: some layer attends to less than all tokens before.
    """
    config = getattr(model, "config", None)
    usual = ["sliding_attention"] if getattr(config, "sliding_window", None) else []
    kinds = set(getattr(config, "layer_types", None) or usual) - {"full_attention"}
    if kinds:
        raise AccelError(
            f"cp: {type(model).__name__} has layers of {', '.join(sorted(kinds))}, whose masks"
            " cannot be shared out\nuse a model with full attention, or train without cp"
        )
    for name, module in model.named_modules():
        if name.endswith("self_attn"):
            module.register_forward_pre_hook(_unmask, with_kwargs=True)


def _unmask(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    if "attention_mask" in kwargs:
        kwargs.update(attention_mask=None, is_causal=True)
    return args, kwargs

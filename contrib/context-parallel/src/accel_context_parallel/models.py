"""Causal attention without masks in transformers' models.

A mask would be made from this rank's part of the sequence alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from accel_core import AccelError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Asked", "attend_causally"]


class Asked:
    """A hook of a module.

    A copy of the module asks the same plugin; a pickled one asks nobody.
    """

    def __init__(self, ask: Callable[..., Any] | None = None) -> None:
        self.ask = ask

    def __call__(self, *given: Any) -> Any:
        return None if self.ask is None else self.ask(*given)

    def __deepcopy__(self, memo: Any) -> Asked:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Asked, ()


def attend_causally(model: nn.Module, is_shared: Callable[[], bool]) -> None:
    """Let each `self_attn` be causal instead of masked.

    Other models stay as they are.

    is_shared: whether the forward that runs is of parts of sequences; others keep their masks.

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

    def unmask(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if "attention_mask" in kwargs and is_shared():
            kwargs.update(attention_mask=None, is_causal=True)
        return args, kwargs

    for name, module in model.named_modules():
        if name.endswith("self_attn"):
            module.register_forward_pre_hook(Asked(unmask), with_kwargs=True)

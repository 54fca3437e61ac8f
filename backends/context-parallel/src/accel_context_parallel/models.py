"""The arguments of models that see a part of each sequence: no mask, and the positions of the part.

A mask, and positions that a model counts by itself, would be those of a sequence of the part's length.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accel_core import AccelError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Asked", "PositionArgument", "attend_causally", "refuse_unshifted_labels"]

_BY_NAME = sys.maxsize
"""Index of an argument that is never passed by position."""


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


class PositionArgument:
    """The argument `position_ids` of a model's forward.

    index: its place among the arguments; None: the forward takes none.
    """

    def __init__(self, model: nn.Module) -> None:
        self.name, self.index = type(model).__name__, _index_of_positions(model)
        self.is_elsewhere = False
        """Positions were seen among the other arguments."""

    def tokens_without(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """Return the tokens, or embeddings, that come without positions; None if positions are passed."""
        assert self.index is not None
        own = args[self.index] if self.index < len(args) else kwargs.get("position_ids")
        named = (kwargs.get(name) for name in ("input_ids", "inputs_embeds"))
        found = next((each for each in (*named, *args[:1]) if isinstance(each, Tensor)), None)
        return found if own is None else None

    def filled(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], where: Tensor
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with these positions."""
        assert self.index is not None
        if self.index < len(args):
            return (*args[: self.index], where, *args[self.index + 1 :]), kwargs
        return args, {**kwargs, "position_ids": where}

    def find_elsewhere(self, inputs: Iterable[Any], where: Tensor) -> None:
        """Look once, in the first forward of a part, if some input holds the positions of the part.

        Raises:
            AccelError: none does, so that the model takes its part for the head of the sequence.
        """
        tensors = [each for each in inputs if isinstance(each, Tensor) and not each.is_floating_point()]
        rows = (
            each.movedim(dim, -1)
            for each in tensors
            for dim, size in enumerate(each.shape)
            if size == len(where)
        )
        self.is_elsewhere = any(torch.equal(each, where.to(each).expand_as(each)) for each in rows)
        if not self.is_elsewhere:
            raise AccelError(
                f"cp: the forward of {self.name} takes no position_ids, and would count the positions of this"
                " rank's part of each sequence from 0\nlet it take position_ids, or give it an entry of the"
                " batch that holds the positions; for a model without positions set cp.derive: false"
            )


def _index_of_positions(model: nn.Module) -> int | None:
    parameters = inspect.signature(model.forward).parameters
    if (own := parameters.get("position_ids")) is not None:
        return _BY_NAME if own.kind is own.KEYWORD_ONLY else [*parameters].index("position_ids")
    hands_on = any(each.kind is each.VAR_KEYWORD for each in parameters.values())  # as adapters do
    if hands_on and any(_index_of_positions(each) is not None for each in model.children()):
        return _BY_NAME
    return None


def refuse_unshifted_labels(model: nn.Module, kwargs: dict[str, Any]) -> None:
    """Refuse a forward on a part of each sequence whose loss shifts the labels of that part by itself.

    The loss would lose the token after each piece. Causal losses of transformers take `shift_labels` instead.

    Raises:
        AccelError: the model has such a loss, and is given `labels` without `shift_labels`.
    """
    if kwargs.get("labels") is None or kwargs.get("shift_labels") is not None:
        return
    if any(getattr(module, "loss_type", None) == "ForCausalLM" for module in model.modules()):
        raise AccelError(
            f"cp: {type(model).__name__} is given labels without shift_labels, and would shift the labels of"
            " this rank's part of each sequence, which loses the token after each piece\nlet batches have"
            " labels, and pass the entry that the loader adds: model(**batch), or"
            " shift_labels=batch['shift_labels']"
        )


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

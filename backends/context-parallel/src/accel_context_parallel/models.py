"""The arguments of models that see a part of each sequence: positions, a mask, labels.

Positions and masks that a model makes by itself would be for a sequence of the part's length.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accel_core import AccelError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Argument", "Asked", "PositionArgument", "own_positions", "refuse_unshifted_labels", "tokens_in"]

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


class Argument:
    """An argument of a model's forward.

    index: the argument's place among the positional ones; None: the forward does not take the argument.
    """

    def __init__(self, model: nn.Module, name: str) -> None:
        self.name, self.index = name, _index_of(model, name)

    def get(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the value that is passed; None if there is none."""
        if self.index is not None and self.index < len(args):
            return args[self.index]
        return kwargs.get(self.name)

    def put(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with this value."""
        assert self.index is not None
        if self.index < len(args):
            return (*args[: self.index], value, *args[self.index + 1 :]), kwargs
        return args, {**kwargs, self.name: value}


def own_positions(model: nn.Module) -> Iterator[str]:
    """Yield a reason to refuse a model that does not count positions from 0.

    RoBERTa and OPT compute them from the padding of the whole row, of which a rank has a part. Their position
    embeddings have a padding index, or an offset.
    """
    for name, module in model.named_modules():
        is_padded = name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None
        if is_padded or (isinstance(module, torch.nn.Embedding) and hasattr(module, "offset")):
            yield (
                f"cp: {type(model).__name__} makes positions from the padding of whole rows ({name}), and"
                " each rank has a part of a row\n"
                "pass the positions yourself, in an entry position_ids of the batch, with cp.derive: false"
            )


def tokens_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the tokens, or embeddings, of a forward."""
    named = (kwargs.get(name) for name in ("input_ids", "inputs_embeds"))
    return next((each for each in (*named, *args[:1]) if isinstance(each, Tensor)), None)


class PositionArgument(Argument):
    """The argument `position_ids` of a model's forward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, "position_ids")
        self.model = type(model).__name__
        self.is_elsewhere = False
        """Positions were seen among the other arguments."""

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
                f"cp: the forward of {self.model} takes no position_ids, and would count the positions of"
                " this rank's part of each sequence from 0\nlet it take position_ids, or give it an entry of"
                " the batch that holds the positions; for a model without positions set cp.derive: false"
            )


def _index_of(model: nn.Module, name: str) -> int | None:
    parameters = inspect.signature(model.forward).parameters
    if (own := parameters.get(name)) is not None:
        return _BY_NAME if own.kind is own.KEYWORD_ONLY else [*parameters].index(name)
    hands_on = any(each.kind is each.VAR_KEYWORD for each in parameters.values())  # as adapters do
    if hands_on and any(_index_of(each, name) is not None for each in model.children()):
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

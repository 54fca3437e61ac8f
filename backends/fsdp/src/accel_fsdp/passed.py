"""Stand-ins for what modules of earlier stages of a pipeline would give.

A stage's forward begins with what the model does before the stage, for its shapes. None of these values may
be used once the stage has begun: the one tensor that was sent is given to its first module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from accel_core import AccelError

__all__ = ["Passed", "Running", "refusal"]

BY_FIRST: Final = frozenset({"to", "type_as", "expand_as", "view_as", "reshape_as"})
"""Operations that take shapes, dtypes and devices of all arguments but the first."""


class Running:
    """The stage of the model that is running, and its input."""

    def __init__(self) -> None:
        self.stage: int | None = None
        self.received: Tensor | None = None
        self.passed: Tensor | None = None
        """Stands for what modules before the stage would give."""
        self.entered = False

    @contextmanager
    def at(self, stage: int, received: Tensor | None) -> Iterator[None]:
        """Count the forwards inside as this stage's."""
        self.stage, self.received, self.entered = stage, received, stage == 0
        self.passed = None if received is None else _stand_in(received, self)
        try:
            yield
        finally:
            self.stage = self.received = self.passed = None


class Passed(torch.Tensor):
    """A tensor computed from stand-ins; an error where a stage computes with it."""

    running: Running

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        name, tensors = func.__name__, [leaf for leaf in tree_leaves(found) if isinstance(leaf, Passed)]
        by_shape = name.endswith("_like") or name.startswith("new_")
        if by_shape or (name in BY_FIRST and not isinstance(args[0], Passed)):
            return tree_map_only(Passed, lambda each: each.as_subclass(Tensor), found)
        if not tensors and name != "__setitem__":
            return found
        running = next(leaf.running for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Passed))
        if running.entered and running.stage is not None:
            raise refusal(running, name)
        for each in tensors:
            each.running = running
        return found


def refusal(running: Running, use: str) -> AccelError:
    """Return the error for a stand-in that is used."""
    return AccelError(
        f"pipeline: stage {running.stage} uses ({use}) what an earlier stage computed, beside the one tensor"
        " that stages send: a skip connection, or a second input\n"
        "compute it again in this stage, or have one stage do all of it (fsdp.pp_split_points)"
    )


def _stand_in(received: Tensor, running: Running) -> Tensor:
    """Return a tensor like the one that a stage received."""
    if type(received) is not Tensor:
        return received
    passed = received.detach().clone().as_subclass(Passed)
    passed.running = running
    return passed

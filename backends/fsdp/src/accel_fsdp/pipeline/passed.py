"""Stand-ins for the outputs of modules of earlier stages of a pipeline.

A stage's forward begins with the model's code before the stage, for its shapes. None of these values may
be used once the stage has begun: the one tensor that was sent is given to its first module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from accel_core import AccelError

if TYPE_CHECKING:
    from accel_fsdp.pipeline.draws import Draws

__all__ = ["Passed", "Running", "received_by", "refusal", "unpassable"]

NUMBERS: Final = frozenset({"item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "__contains__"}) | {
    f"__{kind}__" for kind in ("array", "bool", "complex", "float", "index", "int")
}
"""Operations that take values out of tensors, which cannot be followed further."""
BY_FIRST: Final = frozenset({"to", "type_as", "expand_as", "view_as", "reshape_as"})
"""Operations that take shapes, dtypes and devices of all arguments but the first."""


class Running:
    """The stage of the model that is running, and its input."""

    def __init__(self) -> None:
        self.stage: int | None = None
        self.received: Tensor | None = None
        self.passed: Tensor | None = None
        """Stands for the outputs of modules before the stage."""
        self.entered = False
        self.draws: Draws
        """Numbers that all stages draw alike."""

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
    """A tensor computed from stand-ins; an error if a stage computes with it."""

    running: Running
    received: Tensor
    """The stage's input, for a checkpoint that computes its first module again."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, kwargs = func.__name__, kwargs or {}
        by_shape = name.endswith("_like") or name.startswith("new_")
        if by_shape or (name in BY_FIRST and not isinstance(args[0], Passed)):
            args, kwargs = tree_map_only(Passed, lambda each: each.as_subclass(Tensor), (args, kwargs))
            return func(*args, **kwargs)
        found = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        computed = [each for each in tree_leaves(found) if isinstance(each, Passed)]
        leaves_tensors = name in NUMBERS or _writes_plain_tensors(name, args, kwargs)
        if not computed and not leaves_tensors:
            return found
        source = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Passed))
        running = source.running
        # A number, and a plain tensor that is written in place, no longer say that they stand for a value of
        # an earlier stage: their use could not be noticed later.
        if running.stage is not None and (running.entered or leaves_tensors):
            raise refusal(running, name)
        for each in computed:
            each.running, each.received = running, source.received
        return found


def _writes_plain_tensors(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    in_place = name == "__setitem__" or name.startswith("__i") or name.strip("_") + "_" == name
    written = tree_leaves((args[:1] if in_place else (), kwargs.get("out")))
    return any(isinstance(leaf, Tensor) and not isinstance(leaf, Passed) for leaf in written)


def refusal(running: Running, use: str) -> AccelError:
    """Return the error for a stand-in that is used."""
    return AccelError(
        f"pipeline: stage {running.stage} uses ({use}) what an earlier stage computed, beside the one tensor"
        " that stages send: a skip connection, or a second input\n"
        "compute it again in this stage, or have one stage do all of it (fsdp.pp_split_points)"
    )


def unpassable(running: Running, kind: str, error: Exception) -> AccelError:
    """Return the error for a forward of a `kind` that fails before its stage begins.

    Until then it has met nothing but stand-ins, and modules without weights.
    """
    return AccelError(
        f"pipeline: stage {running.stage} cannot pass over the modules before it in {kind}, each of which"
        f" gives one tensor here: {type(error).__name__}: {error}\n"
        "layers that give several values, and an encoder beside a decoder, cannot be cut; split the model"
        " elsewhere (fsdp.pp_split_points), or not at all (parallelism.pp)"
    )


def _stand_in(received: Tensor, running: Running) -> Tensor:
    """Return a tensor like the one that a stage received."""
    if type(received) is not Tensor:
        return received
    passed = received.clone().as_subclass(Passed)  # a reentrant checkpoint asks if it requires a gradient
    passed.running, passed.received = running, received
    return passed


def received_by(args: Sequence[Any]) -> Sequence[Any]:
    """Return a stage's first arguments, with the received tensor in place of a stand-in."""
    first = args[:1]
    return (first[0].received, *args[1:]) if first and isinstance(first[0], Passed) else args

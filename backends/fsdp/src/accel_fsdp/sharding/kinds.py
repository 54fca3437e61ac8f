"""Optimizers of sharded parameters and plain ones.

torch's `foreach` and `fused`, which are the default on a GPU, compute no list of both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["step_by_kind"]


def step_by_kind(
    optimizer: Optimizer, closure: Callable[[], Any] | None, step: Callable[[Callable[[], Any] | None], bool]
) -> bool:
    """Call `step` while groups are parted.

    The closure, which it is given, sees whole ones.
    """
    with _kinds_apart(optimizer) as kinds:

        def over_whole_groups() -> Any:
            assert closure is not None
            kinds.join()
            loss = closure()
            kinds.part()
            return loss

        return step(over_whole_groups if closure else None)


@contextmanager
def _kinds_apart(optimizer: Optimizer) -> Iterator[_Kinds]:
    """Part groups of DTensors and plain tensors while the optimizer computes a step.

    Hooks of the step see groups that are whole.
    """
    kinds = _Kinds(optimizer)
    handles = []
    if hasattr(optimizer, "_optimizer_step_pre_hooks"):
        handles.append(optimizer.register_step_pre_hook(kinds.part))  # after all others
        handles.append(optimizer.register_step_post_hook(kinds.join))
        optimizer._optimizer_step_post_hooks.move_to_end(handles[1].id, last=False)  # type: ignore[attr-defined]
    else:
        kinds.part()
    try:
        yield kinds
    finally:
        for handle in handles:
            handle.remove()
        kinds.join()


class _Kinds:
    """Groups of an optimizer, which can be parted into DTensors and plain tensors.

    Optimizers without `foreach` step tensors one by one.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.parts: Sequence[Sequence[dict[str, Any]]] = ()
        """Parts of each group, while groups are parted."""

    def part(self, *call: Any) -> None:
        groups = self.optimizer.param_groups
        parts = [_kinds(group) if "foreach" in group else [group] for group in groups]
        if len(groups) < sum(map(len, parts)):
            self.groups, self.parts = groups, parts
            self.optimizer.param_groups = [part for group in parts for part in group]

    def join(self, *call: Any) -> None:
        if not self.parts:
            return
        self.optimizer.param_groups = self.groups
        for group, (part, *_) in zip(self.groups, self.parts, strict=True):
            group.update({**part, "params": group["params"]})  # some optimizers count steps in groups
        self.parts = ()


def _kinds(group: dict[str, Any]) -> list[dict[str, Any]]:
    kinds: dict[bool, list[Any]] = {}
    for parameter in group["params"]:
        kinds.setdefault(isinstance(parameter, DTensor), []).append(parameter)
    return [{**group, "params": same} for same in kinds.values()] if len(kinds) > 1 else [group]

"""Elements of a parameter that one rank steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import define

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["Stepped"]


@define(eq=False)
class Stepped:
    """The range of a flattened parameter that this rank steps.

    Attributes:
        parameter: the parameter of a chunk.
        key: the tensor that the optimizer steps, and keeps its state under.
        begin: the first element of the parameter that this rank steps.
        optimizer: the optimizer inside megatron-core's.
        group: the optimizer's group that has the key.
        counts_by_group: True if `step` is in the group, as with optimizers of transformer-engine and apex.
    """

    parameter: nn.Parameter
    key: Tensor
    begin: int
    optimizer: Any
    group: dict[str, Any]
    counts_by_group: bool

    @property
    def elements(self) -> Tensor:
        """The elements, as a flat view of the stepped tensor: of the float32 master, if there is one."""
        return self.key.detach().view(-1)

    @property
    def state(self) -> dict[str, Any]:
        """The state of the key; empty before the first step."""
        found: dict[str, Any] = self.optimizer.state.get(self.key, {})
        return found

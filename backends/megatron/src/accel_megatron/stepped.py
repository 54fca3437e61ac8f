"""Elements of a parameter that one rank steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import define

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["Stepped"]


@define(eq=False)
class Stepped:
    """A parameter's elements that this rank steps: from `begin` on, flattened.

    key: the tensor that the optimizer keeps state under. group: the key's, of that optimizer.
    """

    parameter: nn.Parameter
    key: Tensor
    begin: int
    optimizer: Any
    group: dict[str, Any]

    @property
    def elements(self) -> Tensor:
        """One dimension.

        A view of the live storage, the float32 master where there is one.
        """
        return self.key.detach().view(-1)

    @property
    def state(self) -> dict[str, Any]:
        """Of the key, possibly none yet."""
        found: dict[str, Any] = self.optimizer.state.get(self.key, {})
        return found

    @property
    def counts_by_group(self) -> bool:
        """True if `step` is kept per group, as transformer-engine's and apex's do."""
        return not type(self.optimizer).__module__.startswith("torch.optim")

"""Weights in 16 bits that the user edits in place between steps.

The optimizer steps float32 masters of them, so the next step would undo an edit in silence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from accel_core import AccelError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from accel_megatron.stepped import Stepped

__all__ = ["Edits"]


class Edits:
    """Edits of the weights that have masters, which take them over.

    Compared are each weight's version, place and norm, because an edit of `parameter.data` counts no version.
    Such an edit is not seen where it keeps a weight's norm to the last digit, as a permutation may.
    """

    def __init__(self, stepped: Iterable[Stepped], copied: Iterable[Tensor]) -> None:
        halves = (torch.float16, torch.bfloat16)
        weights = [
            each for each in stepped if each.parameter.dtype in halves and each.key.dtype not in halves
        ]
        # float8 tensors of transformer-engine say bfloat16, and are laid out otherwise
        self._masters = [each for each in weights if type(each.parameter.detach()) is torch.Tensor]
        self._homes = [each.parameter.detach() for each in self._masters]
        plain = [(each, each.detach()) for each in copied]
        self._placed = [pair for pair in plain if type(pair[1]) is torch.Tensor]
        """Weights of which others are stepped, and what megatron-core writes these into."""
        self.note()

    def note(self) -> None:
        """Take the weights for unedited: after a step, or a load."""
        self._versions, self._norms = self._count(), self._measure()

    @torch.no_grad()
    def take_over(self) -> None:
        """Write edited weights into their masters, each rank its own part.

        Elements that were not edited keep the masters' digits. Raises AccelError for replaced ones.
        """
        for parameter, home in self._placed:
            if parameter.data_ptr() != home.data_ptr():
                raise AccelError(
                    f"megatron: a weight of shape {list(home.shape)} was replaced (parameter.data = tensor),"
                    " and megatron-core would write its steps into the old one\n"
                    "copy into it: parameter.data.copy_(tensor)"
                )
        if self._count() == self._versions and torch.equal(self._measure(), self._norms):
            return
        for each in self._masters:
            master = each.elements
            written = each.parameter.detach().view(-1)[each.begin : each.begin + master.numel()]
            is_kept = master.to(written.dtype) == written
            master.copy_(torch.where(is_kept, master, written.to(master.dtype)))

    def _count(self) -> list[int]:
        return [each.parameter._version for each in self._masters]

    def _measure(self) -> Tensor:
        return (
            torch.stack(torch._foreach_norm(self._homes, dtype=torch.float64))
            if self._homes
            else torch.empty(0)
        )

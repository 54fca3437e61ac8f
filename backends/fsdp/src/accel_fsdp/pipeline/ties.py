"""Weights of several pipeline stages.

Each has all of it, and the gradient is the sum over the stages.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["Ties"]

Places = dict[int, list["tuple[nn.Module, str]"]]
"""Of one weight: stage -> modules, and their name for it."""


class Ties:
    """Tied weights of one pipeline, found before anything is sharded."""

    def __init__(
        self, pieces: Mapping[int, Sequence[nn.Module]], group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self.group, self.device, self.rank = group, device, dist.get_rank(group)
        self._summed = True
        """True if nothing came to sum since the last time."""
        self._places = _places(pieces)
        self._tied: list[tuple[nn.Parameter, list[int]]] = []
        """This rank's, and the ranks that have each."""

    @torch.no_grad()
    def begin(self) -> None:
        """Make each tie one sharded parameter, with the values of its first rank.

        Collective.
        """
        if self._places:  # NCCL's communicator is made by all ranks of a group, not by pairs
            dist.all_reduce(torch.zeros(1, device=self.device), group=self.group)
        for places in self._places:
            ranks = {stage: stage % self.group.size() for stage in places}
            here = next((places[stage][0] for stage in places if ranks[stage] == self.rank), None)
            parameter = here[0]._parameters[here[1]] if here else None
            if parameter is None:
                continue
            for module, name in chain(*places.values()):
                module._parameters[name] = parameter
            if len(having := sorted({*ranks.values()})) > 1:
                self._tied.append((parameter, having))
                _local(parameter).copy_(self._everyones(parameter, having)[0])

    @torch.no_grad()
    def expect(self) -> None:
        """Leave a sum to the tie's first rank: a backward adds to it before the next."""
        for weight, ranks in self._tied if self._summed else ():
            if weight.grad is not None and ranks[0] != self.rank:
                weight.grad.zero_()
        self._summed = False

    @torch.no_grad()
    def sum(self) -> None:
        """Sum the gradients of each tie over its ranks, once per window. Collective."""
        if self._summed:
            return
        self._summed = True
        for weight, ranks in self._tied:
            if weight.requires_grad:
                weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
                _local(weight.grad).copy_(torch.stack(self._everyones(weight.grad, ranks)).sum(0))

    def counted_elsewhere(self) -> Collection[nn.Parameter]:
        """Return this rank's parameters that an earlier stage counts."""
        return {parameter for parameter, ranks in self._tied if ranks[0] != self.rank}

    def _everyones(self, tensor: Tensor, ranks: Sequence[int]) -> list[Tensor]:
        """Each rank's tensor, in the order of ranks, so that sums are the same."""
        mine = _local(tensor).to(self.device).contiguous()
        given = {rank: torch.empty_like(mine) for rank in ranks if rank != self.rank}
        transfers = [
            dist.P2POp(operation, sent, group=self.group, group_peer=rank)
            for rank, theirs in given.items()
            for operation, sent in ((dist.isend, mine), (dist.irecv, theirs))
        ]
        for transfer in dist.batch_isend_irecv(transfers):
            transfer.wait()
        return [given.get(rank, mine) for rank in ranks]


def _places(pieces: Mapping[int, Sequence[nn.Module]]) -> list[Places]:
    found: dict[nn.Parameter, Places] = {}
    for stage, modules in pieces.items():
        for module in chain(*(piece.modules() for piece in modules)):
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    found.setdefault(parameter, {}).setdefault(stage, []).append((module, name))
    return [places for places in found.values() if len(places) > 1]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

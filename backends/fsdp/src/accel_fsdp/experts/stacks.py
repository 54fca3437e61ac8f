"""Experts spread over the ranks of dimension `ep`.

Each has some of a layer's, and tokens travel to them.

A layer's experts are one module that has their weights stacked, `(experts, ...)`, and is called in either of
two ways: with rows grouped by expert and how many each expert gets (torchtitan's models), or with tokens,
their experts and these experts' weights (transformers' models). Its own forward then runs as it is written,
on the weights of this rank's experts and on all ranks' rows for them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from accel_core import AccelError, ConfigError
from accel_fsdp.classes import become
from accel_fsdp.model_plan import words_of
from accel_fsdp.naming import did_you_mean

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Spread", "split", "spread"]

EXPERTS: Final = ("experts", "*.experts")
"""Names of experts in models that bring no plan of expert parallelism."""


def spread(model: nn.Module, patterns: Sequence[str] | None, mesh: DeviceMesh) -> None:
    """Let tokens travel to the experts that `patterns` name; None: the model's plan, or `EXPERTS`.

    Their weights are still whole.

    Raises:
        ConfigError: a pattern matches nothing, or something that is not a stack of experts `mesh` divides.
    """
    named = {name: module for name, module in model.named_modules() if name}
    planned = words_of(model, "ep_plan") if patterns is None else {}
    found = {name for name, word in planned.items() if word == "ep_dispatch_experts"}
    patterns = EXPERTS if patterns is None else patterns
    found = found or {name for name in named for pattern in patterns if fnmatchcase(name, pattern)}
    if patterns and not found:
        raise ConfigError(
            f"fsdp.ep_modules: {', '.join(patterns)} match no module of this {type(model).__name__}"
            f"{did_you_mean(patterns[0], named)}\n"
            "name the modules that hold experts; a model without any takes fsdp.ep_modules: []"
        )
    counts = {name: _count(name, named[name], mesh.size()) for name in sorted(found)}
    for name, experts in counts.items():
        become(named[name], Spread, _experts=experts, _ranks=mesh.get_group(), _name=name)


def split(module: nn.Module, mesh: DeviceMesh) -> None:
    """Keep this rank's experts of a stack that is whole, and the same on all ranks.

    Not collective.
    """
    for each in module.modules():
        for key, whole in each._parameters.items():
            if whole is not None:
                part = distribute_tensor(whole.detach(), mesh, [Shard(0)], src_data_rank=None)
                own = DTensor.from_local(part.to_local().clone(), mesh, [Shard(0)], run_check=False)
                each._parameters[key] = nn.Parameter(own, requires_grad=whole.requires_grad)


def _count(name: str, module: nn.Module, ranks: int) -> int:
    """Return the number of experts that the module holds."""
    if any(isinstance(each, (nn.ModuleList, nn.ModuleDict)) for each in module.modules()):
        raise ConfigError(
            f"fsdp.ep_modules: {name} is a list of experts, which are called one by one, where no token can"
            " travel\nstack their weights in one module, (experts, ...), as torchtitan and transformers do"
        )
    shapes = {key: tuple(weight.shape) for key, weight in module.named_parameters()}
    experts = next((shape[0] for shape in shapes.values() if shape), 0)
    odd = next((key for key, shape in shapes.items() if len(shape) < 2 or shape[0] != experts), None)
    if odd is not None or not experts:
        found = f"{odd} of shape {shapes[odd]}" if odd else "no weights"
        raise ConfigError(
            f"fsdp.ep_modules: {name} has {found}, and is not a stack of {experts} experts\n"
            "name modules whose parameters all have one expert after the other along their first dimension"
        )
    if experts % ranks:
        raise ConfigError(
            f"parallelism.ep {ranks}: {name} has {experts} experts, which is not a multiple of it\n"
            f"choose a divisor of {experts}"
        )
    return experts


class Spread:
    """Put before the class of a stack of experts."""

    _experts: int
    _ranks: dist.ProcessGroup
    _name: str

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # how many rows travel is known only then
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Send tokens to the ranks that have their experts. Collective over `ep`."""
        if kwargs:
            args = tuple(inspect.signature(super().forward).bind(*args, **kwargs).arguments.values())  # type: ignore[misc]
        kinds = [arg.dim() if isinstance(arg, Tensor) else None for arg in args]
        if kinds == [2, 1] and len(args[1]) == self._experts:
            return self._travel(args[0], args[1].long())
        if kinds == [2, 2, 2] and len(args[0]) == len(args[1]) and args[1].shape == args[2].shape:
            return self._chosen(*args)
        shapes = [tuple(arg.shape) if isinstance(arg, Tensor) else type(arg).__name__ for arg in args]
        raise AccelError(
            f"fsdp.ep_modules: {self._name} was called with {', '.join(map(str, shapes))}\n"
            f"experts are called with (rows grouped by expert, ({self._experts},) counts), or with (tokens,"
            " (tokens, k) experts, (tokens, k) weights)"
        )

    def _chosen(self, tokens: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Sum of the outputs of each token's experts.

        tokens (T, width), experts and weights (T, k).
        """
        order = experts.flatten().argsort(stable=True)
        chosen = experts.flatten()  # counted without waiting for the device, as bincount would
        counts = chosen.new_zeros(self._experts).scatter_add(0, chosen, torch.ones_like(chosen))
        token = order // experts.shape[1]
        rows = self._travel(tokens[token], counts, weights.flatten()[order])
        return rows.new_zeros(len(tokens), rows.shape[-1]).index_add(0, token, rows)

    def _travel(self, rows: Tensor, counts: Tensor, weights: Tensor | None = None) -> Tensor:
        """Send rows to the ranks of their experts, through these, and back.

        rows (N, width), grouped by expert.
        """
        ranks, group = self._ranks.size(), self._ranks
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=group)
        # Sizes of the rows that travel are read once; nothing else here waits for the device.
        sent, got = torch.stack([counts, arriving]).view(2, ranks, -1).sum(2).tolist()
        total = sum(got)
        # Rows arrive grouped by rank, and by expert within each rank.
        local = torch.arange(self._experts // ranks, device=counts.device)
        mine = local.repeat(ranks).repeat_interleave(arriving, output_size=total)
        experts, order = mine.sort(stable=True)

        def arrived(tensor: Tensor) -> Tensor:
            there = all_to_all_single_autograd(tensor, got, sent, group)[order]
            # Backward is collective: a rank without tokens computes an empty one along.
            return there if total else torch.cat([there, there.new_zeros(1, *there.shape[1:])])

        if not total:
            experts = experts.new_zeros(1)
        if weights is None:
            each = arriving.view(ranks, -1).sum(0)
            routing: tuple[Tensor, ...] = (each if total else local.eq(0).to(each.dtype),)
        else:
            routing = (experts[:, None], arrived(weights)[:, None])
        with _local(self, ranks):
            out = super().forward(arrived(rows), *routing)  # type: ignore[misc]
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return all_to_all_single_autograd(out[back], sent, got, group)


@contextmanager
def _local(module: Any, ranks: int) -> Iterator[None]:
    """Make the module's weights plain tensors, of this rank's experts only."""
    places = [
        (each._parameters, key, weight)
        for each in module.modules()
        for key, weight in each._parameters.items()
        if weight is not None
    ]
    counted = vars(module).get("num_experts") == module._experts
    for table, key, weight in places:
        table[key] = _averaged(weight, ranks)
    if counted:
        module.num_experts = module._experts // ranks
    try:
        yield
    finally:
        for table, key, weight in places:
            table[key] = weight
        if counted:
            module.num_experts = module._experts


def _averaged(weight: Any, ranks: int) -> Tensor:
    # Gradients are sums over the losses of all ranks of `ep`, whose mean is wanted. Who shards the weight
    # takes that over all other ranks.
    local: Tensor = weight.to_local()
    if local.requires_grad:
        local.register_hook(lambda gradient: gradient / ranks)
    return local

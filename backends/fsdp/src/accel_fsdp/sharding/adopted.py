"""Models that the program has sharded before `prepare`, as transformers does while it loads them.

torch's own state describes them, whoever called `fully_shard`. The model keeps its groups, meshes, policies
and offload; the run keeps its topology, whose ranks must be the model's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

import torch.distributed as dist
from attrs import fields
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor

from accel_fsdp.model_plan import places, words_of
from accel_fsdp.sharding.accumulated import param_groups

if TYPE_CHECKING:
    from accel_core import Mesh, Unit
    from accel_fsdp.config import FullyShardedDataParallelPlugin

__all__ = [
    "described_as_adopted",
    "is_adopted",
    "note_made",
    "refused_layout",
    "refused_parts",
    "sums_in_backward",
    "tell_ignored",
    "unmanaged",
    "was_made",
]

logger = logging.getLogger(__name__)

OWNED: Final = ("activation_checkpointing", "ignored_modules", "mixed_precision_policy", "param_init_fn")
"""Options that only a model can follow that `prepare` shards."""
IGNORED: Final = (
    *("auto_wrap_policy", "transformer_cls_names_to_wrap", "min_num_params"),
    *("sharding_strategy", "reshard_after_forward", "cpu_ram_efficient_loading"),
    *("forward_prefetch", "backward_prefetch", "limit_all_gathers"),
)
"""Options about groups, which the model has. Accelerate's Trainer sets some of them in every run."""

_made: WeakSet[nn.Module] = WeakSet()
"""Modules that a `prepare` of this process has sharded or adopted."""


def note_made(modules: Iterable[nn.Module]) -> None:
    """Remember that `prepare` has sharded or adopted these modules."""
    _made.update(modules)


def was_made(model: nn.Module) -> bool:
    """Return True if a `prepare` of this process has sharded or adopted the model, or a part of it."""
    return not _made.isdisjoint(model.modules())


def is_adopted(model: nn.Module) -> bool:
    """Return True if the program has sharded the model, or a part of it, by torch's `fully_shard`."""
    return not was_made(model) and any(isinstance(module, FSDPModule) for module in model.modules())


def sums_in_backward(model: nn.Module) -> list[str]:
    """Return the modules whose gradients transformers sums over tensor-parallel ranks after each backward.

    Norms of heads, as in Qwen 3. transformers sums `parameter.grad`, which has earlier micro-batches too.
    """
    known = places(model)
    words = words_of(model, "tp_plan").items()
    summed = [name for name, word in words if word == "replicated_with_grad_allreduce"]
    return [name for name in summed if "forward" in vars(known[name][0])]


def unmanaged(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that no group of the model gathers, such as adapters that were added later."""
    managed = set(_managed(param_groups(model.modules())))
    return [parameter for parameter in model.parameters() if parameter not in managed]


def refused_layout(unit: Unit, model: nn.Module, config: FullyShardedDataParallelPlugin) -> Iterator[str]:
    """Yield the reasons why the run cannot train an adopted model as it is sharded."""
    name, groups = type(model).__name__, param_groups(model.modules())
    sizes = {dim: unit.run.config.parallelism.get(dim, 1) for dim in ("pp", "ep")}
    for option in (f"parallelism.{dim}" for dim, size in sizes.items() if size != 1):
        yield f"{option} is set, but the program has sharded this {name} before prepare\nleave {option} out"
    if config.fsdp_version == 1:
        yield f"this {name} was sharded by fully_shard before prepare\nset fsdp.fsdp_version: 2"
    offloads = all(isinstance(group.offload_policy, CPUOffloadPolicy) for group in groups)
    for option in (*OWNED, *(() if offloads else ("cpu_offload",))):
        if getattr(config, option):
            yield (
                f"fsdp.{option} is set, but the program has sharded this {name} before prepare\n"
                f"leave fsdp.{option} out, or give prepare a model that is not sharded"
            )
    if empty := next((key for key, each in model.named_parameters() if each.is_meta), None):
        yield f"{empty} of this {name} is on the meta device\nload the model's weights before prepare"
    yield from _refused_ranks(unit, model, groups)


def refused_parts(model: nn.Module, mesh: Mesh | None) -> Iterator[str]:
    """Yield one reason if layers are split over ranks that would read different data."""
    alike = set() if mesh is None else {*mesh.group(*mesh.names("model"))}
    managed = set(_managed(param_groups(model.modules())))
    for key, parameter in model.named_parameters():
        for ranks in () if parameter in managed else _split_over(parameter):
            if not ranks <= alike:
                yield (
                    f"{key} of this {type(model).__name__} is split over the ranks {sorted(ranks)}, which"
                    f" would read different data\nset parallelism.tp: {len(ranks)}; they then read the same"
                )
                return


def _refused_ranks(unit: Unit, model: nn.Module, groups: Sequence[Any]) -> Iterator[str]:
    """Yield one reason if the ranks that share a weight are not the run's."""
    mesh, name = unit.mesh, type(model).__name__
    data = [unit.run.world.rank] if mesh is None else [*mesh.group(*mesh.names("samples", "tokens"))]
    for group in groups:
        ranks = sorted(_ranks(group.mesh_info.mesh))
        # Experts have a divisor: fewer ranks share them, and tokens of all ranks come to them.
        divisor = group.gradient_divide_factor
        if (divisor or len(ranks)) != len(data) or (ranks != data and not divisor):
            yield (
                f"this {name} averages gradients over the {len(ranks)} rank(s) {ranks}, but in this run the"
                f" {len(data)} rank(s) {data} read different data\n{_advice(ranks, data)}"
            )
            return
        replicas = getattr(group.mesh_info, "replicate_mesh_size", 1)
        asked = unit.run.config.parallelism.get("dp_replicate", -1)
        if asked not in (-1, replicas):
            yield (
                f"parallelism.dp_replicate is {asked}, but this {name} has {replicas} replica(s)\n"
                f"set parallelism.dp_replicate: {replicas}, or leave it out"
            )
            return
    yield from refused_parts(model, mesh)


def _split_over(parameter: nn.Parameter) -> Iterator[set[int]]:
    """Yield the ranks of each mesh dimension that a DTensor is split over."""
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        for dim, placement in enumerate(parameter.placements):
            if not placement.is_replicate() and mesh.size(dim) > 1:
                yield set(dist.get_process_group_ranks(mesh.get_group(dim)))


def _advice(ranks: Sequence[int], data: Sequence[int]) -> str:
    if {*ranks} < {*data} and len(data) % len(ranks) == 0:
        return (
            "if the model's layers are split over the others (tp_size of DistributedConfig), set"
            f" parallelism.tp: {len(data) // len(ranks)}; otherwise shard it over all these ranks"
        )
    return (
        "make both alike: parallelism.tp, and the mesh that the model was sharded over (tp_size of"
        " DistributedConfig)"
    )


def _ranks(mesh: Any) -> Iterable[int]:
    found: list[int] = mesh.mesh.flatten().tolist()
    return found


def _managed(groups: Iterable[Any]) -> Iterator[nn.Parameter]:
    # By place: a loader may have put other parameters there, which torch looks up at the first forward.
    for group in groups:
        for info in (one._module_info for one in group.fsdp_params):
            yield info.module._parameters[info.param_name]
            for module, key in zip(info.shared_modules, info.shared_param_names, strict=True):
                yield module._parameters[key]


def tell_ignored(model: nn.Module, config: FullyShardedDataParallelPlugin) -> None:
    """Log the options that an adopted model does not follow, in one line."""
    usual = {field.name: field.default for field in fields(type(config))}
    idle = [f"fsdp.{option}" for option in IGNORED if getattr(config, option) != usual[option]]
    if idle:
        logger.info("%s: ignored, the program has sharded this %s", ", ".join(idle), type(model).__name__)


def described_as_adopted(model: nn.Module) -> str:
    """Return a line about an adopted model."""
    groups = param_groups(model.modules())
    counts = sorted({len([*_ranks(group.mesh_info.mesh)]) for group in groups})
    return (
        f"fsdp: {type(model).__name__} was sharded before prepare, in {len(groups)} group(s) over"
        f" {' or '.join(map(str, counts))} rank(s), and keeps its groups, precision and offload"
    )

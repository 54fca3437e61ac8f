"""Selection of blocks: modules whose weights are gathered together."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from attrs import frozen
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    ActivationWrapper,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.fsdp import wrap

from accel_core import ConfigError
from accel_fsdp.classes import absent
from accel_fsdp.experts.stacks import Spread
from accel_fsdp.naming import did_you_mean
from accel_fsdp.sharding.own_plan import of_classes, own_blocks

if TYPE_CHECKING:
    from accel_fsdp.config import FullyShardedDataParallelPlugin

__all__ = [
    "Group",
    "blocks",
    "checkpointed",
    "chosen_blocks",
    "groups",
    "ignored",
    "is_own_plan",
    "memory_order",
    "refuse_unfit",
    "replace",
]


@frozen(eq=False)
class Group:
    """A module that is sharded by itself, without parts that inner groups have.

    modules: the module and all modules inside it that are in no inner group.
    """

    name: str
    module: nn.Module
    modules: Sequence[nn.Module]

    @property
    def own_parameters(self) -> list[nn.Parameter]:
        """Its own, tied ones once."""
        return list(dict.fromkeys(p for m in self.modules for p in m._parameters.values() if p is not None))


def groups(model: nn.Module, config: FullyShardedDataParallelPlugin) -> list[Group]:
    """Return the blocks, experts that are spread and, last, the model around them.

    Inner ones before outer ones.

    Raises:
        ConfigError: the policy names no module of this model, or parts tied weights; torch cannot shard
            one of the parameters.
    """
    names = {module: name for name, module in model.named_modules()}
    wrappers = {next(module.children()): module for module in names if isinstance(module, ActivationWrapper)}
    outermost = [_outermost(block, wrappers) for block in blocks(model, config)]
    left = _left(model, config)
    spread = [module for module in model.modules() if isinstance(module, Spread) and module not in left]
    roots = [*dict.fromkeys([*outermost, *spread]), model]
    taken = {*left}
    found = []
    for root in sorted(roots, key=lambda module: -names[module].count(".") - (module is not model)):
        mine = [module for module in root.modules() if module not in taken]
        taken.update(mine)
        found.append(Group(names[root], root, mine))
    _refuse_parted(model, found)
    _refuse_unfit(model, found, config.fsdp_version)
    return found


def ignored(model: nn.Module, config: FullyShardedDataParallelPlugin) -> list[nn.Module]:
    """Return the modules that stay whole.

    Raises:
        ConfigError: the pattern matches none.
    """
    given: Any = config.ignored_modules
    if given is None:
        return []
    if not isinstance(given, str):
        return list(given)
    named = dict(model.named_modules())
    found = [module for name, module in named.items() if name and re.fullmatch(given, name)]
    if not found:
        raise _no_match("fsdp.ignored_modules", given, named)
    return found


def blocks(model: nn.Module, config: FullyShardedDataParallelPlugin) -> list[nn.Module]:
    """Return the modules that are gathered each by itself."""
    left = _left(model, config)
    return [module for module in chosen_blocks(model, config, left) if module not in left]


def chosen_blocks(
    model: nn.Module, config: FullyShardedDataParallelPlugin, left: Collection[nn.Module] = ()
) -> list[nn.Module]:
    """Return the blocks of all pipeline stages, by the wrap policy; without one, by the model's own plan.

    left: modules that a policy does not look into.
    """
    policy: Any = config.auto_wrap_policy
    if policy == "NO_WRAP":
        return []
    if config.min_num_params is not None:
        policy = partial(wrap.size_based_auto_wrap_policy, min_num_params=config.min_num_params)
    elif policy == "TRANSFORMER_BASED_WRAP" or config.transformer_cls_names_to_wrap:
        return _named_blocks(model, config.transformer_cls_names_to_wrap)
    elif policy is None:
        return own_blocks(model)
    return list(dict.fromkeys(_by_policy(model, policy, left)))


def is_own_plan(config: FullyShardedDataParallelPlugin) -> bool:
    """Return True if nobody wrote a wrap policy."""
    return not (config.auto_wrap_policy or config.transformer_cls_names_to_wrap or config.min_num_params)


def _left(model: nn.Module, config: FullyShardedDataParallelPlugin) -> set[nn.Module]:
    return {*absent(model), *(module for each in ignored(model, config) for module in each.modules())}


def checkpointed(
    model: nn.Module, config: FullyShardedDataParallelPlugin, function: Callable[..., Any]
) -> nn.Module:
    """Return the model with each block's activations computed again in backward.

    A model without blocks is computed again as a whole. function: torch's, or a plugin's, `checkpoint`.
    """

    def wrapped(module: nn.Module) -> nn.Module:
        again = checkpoint_wrapper(module, checkpoint_fn=function)
        return offload_wrapper(again) if config.activation_checkpointing_offload else again

    found = blocks(model, config)
    replace(model, {block: wrapped(block) for block in found})
    return model if found else wrapped(model)


def replace(model: nn.Module, new: Mapping[nn.Module, nn.Module]) -> None:
    """Put new modules, which may hold the old ones, in the places of the old ones."""
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if child is not None and child in new:
                setattr(module, name, new[child])


def _named_blocks(model: nn.Module, asked: Sequence[str] | None) -> list[nn.Module]:
    """Return the modules of the classes in the option, or else of the classes that the model names."""
    names = asked or list(getattr(model, "_no_split_modules", None) or ())
    known = {type(module).__name__ for module in model.modules()}
    if not names:
        raise _no_match("fsdp.transformer_cls_names_to_wrap", "nothing", known)
    for name in names:
        if name not in known and (asked or known.isdisjoint(names)):
            raise _no_match("fsdp.transformer_cls_names_to_wrap", name, known)
    return of_classes(model, names)


def _by_policy(
    model: nn.Module, policy: Callable[..., bool], left: Collection[nn.Module]
) -> Iterator[nn.Module]:
    """Yield the modules that a function with the arguments of torch's policies chooses."""
    untouched = {p for module in left for p in module.parameters()}

    def chosen_in(module: nn.Module) -> Generator[nn.Module, None, int]:
        """Yield blocks, then return the number of elements in them."""
        size = sum(p.numel() for p in module.parameters() if p not in untouched)
        if not policy(module=module, recurse=True, nonwrapped_numel=size):
            return 0
        inside = 0
        for child in module.children():
            if child not in left:
                inside += yield from chosen_in(child)
        if module is model or not policy(module=module, recurse=False, nonwrapped_numel=size - inside):
            return inside
        yield module
        return size

    yield from chosen_in(model)


def _outermost(block: nn.Module, wrappers: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Return the checkpointing around a block, which is gathered with it.

    wrappers: module -> the checkpointing right around it.
    """
    while block in wrappers:
        block = wrappers[block]
    return block


def _refuse_parted(model: nn.Module, found: Sequence[Group]) -> None:
    """Tied weights that are sharded in two places would silently become two weights."""
    home = {module: group for group in found for module in group.modules}
    first: dict[nn.Parameter, tuple[str, Group]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        if module not in home:
            continue
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            full = f"{prefix}.{name}" if prefix else name
            before, group = first.setdefault(parameter, (full, home[module]))
            if group is not home[module]:
                raise ConfigError(
                    f"{before} and {full} are one weight, but would be sharded apart: one with"
                    f" {group.name or 'the model'}, one with {home[module].name or 'the model'}\n"
                    "choose fsdp.auto_wrap_policy so that both are in one block, or both in none"
                )


def memory_order(strides: Sequence[int]) -> tuple[int, ...]:
    """Return the dimensions of a tensor, the one with the largest stride first."""
    return tuple(sorted(range(len(strides)), key=lambda dim: -strides[dim]))


def _refuse_unfit(model: nn.Module, found: Sequence[Group], version: int) -> None:
    """Parameters that torch's FSDP cannot shard: by name, before anything is sharded."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    for group in found:
        mine = group.own_parameters
        refuse_unfit(group.modules, {names[parameter]: parameter for parameter in mine}, version)
        alike = mine if version == 1 else [p for p in mine if p.requires_grad]
        odd = next((p for p in alike if p.dtype != alike[0].dtype), None)
        if odd is not None:
            raise ConfigError(
                f"{names[alike[0]]} is {alike[0].dtype} and {names[odd]} is {odd.dtype}, but both are sharded"
                f" with {group.name or 'the model'}, as one tensor\n"
                "give them one dtype, or choose fsdp.auto_wrap_policy so that they are in different blocks"
            )


def refuse_unfit(modules: Iterable[nn.Module], parameters: Mapping[str, nn.Parameter], version: int) -> None:
    """Raise ConfigError for one that torch's FSDP cannot shard, by name.

    modules: all that hold them.
    """
    looked_up = (m for m in modules if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse)
    sparse = {parameter for module in looked_up for parameter in module.parameters()}
    for name, parameter in parameters.items():
        if reason := _unfit(parameter, version, is_sparse=parameter in sparse):
            raise ConfigError(f"{name}, {list(parameter.shape)}: {reason}")


def _unfit(parameter: nn.Parameter, version: int, *, is_sparse: bool) -> str | None:
    if is_sparse and parameter.requires_grad:
        return (
            "sparse gradients (sparse=True) cannot be sharded\n"
            "make the module without sparse=True, or use strategy ddp"
        )
    if not parameter.dim():
        return "a parameter without dimensions cannot be sharded\nmake it one of shape (1,)"
    if parameter.is_complex():  # of a vector in parts, torch's Adam changes a copy of its state
        return (
            f"torch's optimizers step sharded {parameter.dtype} wrongly\n"
            "make it two real ones, a buffer where it is not trained, or use strategy ddp"
        )
    if version == 1 and not parameter.is_floating_point():
        return f"fsdp_version 1 cannot shard {parameter.dtype}\nset fsdp.fsdp_version: 2, or make it a buffer"
    lying = parameter.permute(memory_order(parameter.stride())) if version == 1 else parameter
    if not lying.is_contiguous():
        return (
            f"fsdp_version {version} cannot shard a parameter with strides {parameter.stride()}\n"
            "before prepare: parameter.data = parameter.data.contiguous()"
        )
    return None


def _no_match(option: str, asked: str, known: Iterable[str]) -> ConfigError:
    names = sorted(filter(None, known))
    return ConfigError(
        f"{option} {asked!r} matches nothing in this model{did_you_mean(asked, names)}\n"
        f"it has {', '.join(names[:20])}{', ...' if len(names) > 20 else ''}"
    )

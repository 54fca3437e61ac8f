"""The blocks of a model for which nobody wrote a wrap policy.

A block is a group only if it is certain that every rank runs it in each forward. Ranks that gather
different groups wait for each other, or compute with each other's weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from accel_core import AccelError, ConfigError
from accel_fsdp.classes import forward_of
from accel_fsdp.model_plan import places, words_of

__all__ = ["of_classes", "own_blocks", "refuse_members_alone", "repeated_classes"]

WORDS = ("free_full_weight", "keep_full_weight")
"""The words of transformers' fsdp_plan: gathered for each use, or kept gathered after forward."""


def own_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules that the model's own plan names, or the alike members of an `nn.Sequential`.

    Modules that share a weight with another part of the model are left out: both are in one group then.
    """
    if _drops_layers(model):
        return []
    classes = set(getattr(model, "_no_split_modules", None) or ())
    found = of_classes(model, classes) or _of_plan(model) or _alike_members(model)
    homes: dict[nn.Parameter, set[nn.Module]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                homes.setdefault(parameter, set()).add(module)
    inside = {block: set(block.modules()) for block in found}
    return [block for block in found if all(homes[p] <= inside[block] for p in block.parameters())]


def of_classes(model: nn.Module, names: Collection[str]) -> list[nn.Module]:
    """Return the modules inside the model that are of these classes, or of classes derived from them."""
    kinds = tuple({type(module) for module in model.modules() if type(module).__name__ in names})
    return [module for module in model.modules() if isinstance(module, kinds) and module is not model]


def repeated_classes(module: nn.Module) -> list[str]:
    """Return the classes of which lists in the module have several blocks, or of several Linears."""
    linears = [type(each).__name__ for each in module.modules() if isinstance(each, nn.Linear)]
    return list(dict.fromkeys(_repeated(module))) or (sorted({*linears}) if len(linears) > 1 else [])


def refuse_members_alone(model: nn.Module, members: Sequence[nn.Module]) -> None:
    """Refuse calls of a prepared Sequential's members from outside its forward: ranks may skip some."""
    is_running = False

    def enter(*call: Any) -> None:
        nonlocal is_running
        is_running = True

    def leave(*call: Any) -> None:
        nonlocal is_running
        is_running = False

    def check(*call: Any) -> None:
        if not torch.compiler.is_compiling() and not is_running:
            raise AccelError(
                "a member of a prepared Sequential was called outside its forward; fsdp shards members by"
                " themselves, and ranks that skip different ones would mix their weights\n"
                "call the prepared model, or prepare a module of your own whose forward calls its members"
            )

    model.register_forward_pre_hook(torch.compiler.disable(enter), prepend=True)
    model.register_forward_hook(torch.compiler.disable(leave), always_call=True)
    for member in members:
        member.register_forward_pre_hook(check, prepend=True)  # before torch's, which gathers


def _drops_layers(model: nn.Module) -> bool:
    """Return True if the config of a transformers model has ranks skip different layers (LayerDrop)."""
    configs = (vars(module).get("config") for module in model.modules())
    options = (option for config in configs for option in getattr(config, "__dict__", {}).items())
    return any(name.endswith("layerdrop") and value for name, value in options)


def _of_plan(model: nn.Module) -> list[nn.Module]:
    """Return the modules that a transformers model's plan gathers and frees each by itself.

    The model has merged the plans of its config, of its class and of its children. Modules that the plan
    keeps gathered go with the model around the blocks, which torch keeps gathered too.
    """
    words = words_of(model, "fsdp_plan")
    unknown = {name: word for name, word in words.items() if word not in WORDS}
    if unknown:
        name, word = next(iter(unknown.items()))
        raise ConfigError(
            f"the fsdp_plan of {type(model).__name__} says {word!r} for {name}, which is not a known word\n"
            f"choose among {', '.join(WORDS)}; or set fsdp.auto_wrap_policy"
        )
    return [
        module
        for name, (module, key) in places(model).items()
        if key is None and module is not model and words.get(name) == "free_full_weight"
    ]


def _alike_members(model: nn.Module) -> list[nn.Module]:
    """Return the members of a model that is an `nn.Sequential` itself, of which it has several of one class.

    torch's forward runs each of them. A Sequential inside the model may be sliced or skipped by a forward.
    """
    if not isinstance(model, nn.Sequential) or forward_of(model) is not nn.Sequential.forward:
        return []
    blocks = [child for child in model.children() if child._modules and any(True for _ in child.parameters())]
    number = Counter(map(type, blocks))
    return [block for block in blocks if number[type(block)] > 1]


def _repeated(module: nn.Module) -> Iterator[str]:
    """Yield the classes of the outermost lists' blocks, of which a list has several."""
    children = list(module.children())
    in_list = isinstance(module, (nn.ModuleList, nn.Sequential))
    number = Counter(type(child) for child in children if in_list and child._modules)
    for child in children:
        if number[type(child)] > 1:
            yield type(child).__name__
        else:
            yield from _repeated(child)

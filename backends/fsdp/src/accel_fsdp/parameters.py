"""Parameters that sharding replaces.

Their hooks, and what still holds those from before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from accel_core import AccelError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Place",
    "Replaced",
    "guard",
    "guard_conversions",
    "is_guarded",
    "refuse_assigned",
    "refuse_stand_ins",
    "replace_parameter",
    "with_hooks",
]

ADVICE = (
    "use a hook of a module (register_forward_hook, register_full_backward_hook), or change p.grad between"
    " backward and optimizer.step()"
)

Place = tuple[nn.Module, str, Any]
"""A place of a sharded parameter: (module, key, what is asked about it)."""


class Replaced(nn.Parameter):
    """A parameter that another has taken the place of.

    An optimizer that still holds it trains nothing.
    """

    @property
    def grad(self) -> Tensor | None:
        raise AccelError(
            f"{vars(self)['_name']}: preparing its model has put a sharded parameter in the place of this"
            " one, which gets no gradients any more\n"
            "prepare the optimizer too: model, optimizer = accelerator.prepare(model, optimizer)"
        )

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None:
            self.grad  # noqa: B018  raises


def with_hooks(models: Sequence[nn.Module], *, after_accumulation: bool) -> Iterator[str]:
    """Reasons against parameters with hooks that a sharded parameter cannot call.

    after_accumulation: `register_post_accumulate_grad_hook` is one of them.
    """
    for model in models:
        for name, parameter in model.named_parameters():
            if parameter._backward_hooks:
                yield f"{name} has a hook (register_hook), which would never see its whole gradient\n{ADVICE}"
            if after_accumulation and parameter._post_accumulate_grad_hooks:
                yield (
                    f"{name} has a hook (register_post_accumulate_grad_hook), which would never be called\n"
                    f"{ADVICE}, or set fsdp.fsdp_version: 2"
                )


def guard(parameter: Any, name: str, *, after_accumulation: bool) -> None:
    """Refuse hooks that would never be called, from now on."""
    parameter.register_hook = partial(_refuse, name, "register_hook")
    if after_accumulation:
        kind = "register_post_accumulate_grad_hook"
        parameter.register_post_accumulate_grad_hook = partial(_refuse, name, kind)


def is_guarded(parameter: nn.Parameter) -> bool:
    """Return True if an earlier prepare has put the parameter there."""
    return "register_hook" in vars(parameter)


def replace_parameter(old: nn.Parameter, new: Any, name: str) -> None:
    """Take over the hooks that see reduced gradients.

    Let what still holds `old` hear of it, and free it.
    """
    guard(new, name, after_accumulation=False)
    if isinstance(old, (Replaced, DTensor)):  # tied, or made by another plugin
        return
    for hook in (old._post_accumulate_grad_hooks or {}).values():
        new.register_post_accumulate_grad_hook(hook)
    old.data = old.data.new_empty(0)
    old.__class__ = Replaced
    vars(old)["_name"] = name


def refuse_stand_ins(
    module: Any, places: Sequence[Place], is_own: Callable[[Any, Tensor | None], bool]
) -> None:
    """Refuse forwards in which another tensor stands for a sharded parameter.

    torch would gather its own shards over it, or take it for a shard and keep it.
    """

    def look(*call: Any) -> None:
        for holder, key, asked in places:
            now = holder._parameters.get(key)
            if not is_own(asked, now):
                other = "nothing" if now is None else "another tensor"
                raise AccelError(
                    f"{other} stands for the sharded parameter {key} of {type(holder).__name__}"
                    " (torch.func.functional_call, an assignment to it or its data, or full_parameters), and"
                    " a forward would not use it\n"
                    "change weights in place, and leave full_parameters before a forward; for"
                    " functional_call, prepare this model with strategy ddp"
                )

    module.register_forward_pre_hook(torch.compiler.disable(look), prepend=True)


def guard_conversions(model: nn.Module) -> None:
    """Let `model.to(device)` and the like pass where they change nothing.

    torch swaps each sharded parameter for its conversion, also if that is itself, which cannot be done to
    those that core follows.
    """
    groups: dict[nn.Module, FSDPModule] = {}
    for group in model.modules():
        if isinstance(group, FSDPModule):  # those inside it follow, and count for theirs
            groups.update(dict.fromkeys(group.modules(), group))
    for module in model.modules():
        if any(isinstance(parameter, DTensor) for parameter in module._parameters.values()):
            vars(module)["_apply"] = partial(_apply, groups.get(module), module)


def _apply(
    group: FSDPModule | None, module: Any, convert: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Module:
    if group is not None:  # a conversion of gathered weights would be lost
        group.reshard()
    sharded = {key: each for key, each in module._parameters.items() if isinstance(each, DTensor)}
    with torch.no_grad():
        changes = any(convert(each) is not each for each in sharded.values())
    if changes:
        try:
            return cast("nn.Module", type(module)._apply(module, convert, recurse))
        except RuntimeError as error:
            raise AccelError(
                f"the weights of this {type(module).__name__} are sharded, and cannot be converted or moved"
                " once they are prepared\n"
                "do so before prepare; accelerator.get_state_dict gives whole ones to save"
            ) from error
    above: Any = super(FSDPModule, module) if isinstance(module, FSDPModule) else None
    # FSDPModule's own looks for what is taken away here.
    own = above._apply if above else partial(type(module)._apply, module)
    try:
        module._parameters.update(dict.fromkeys(sharded))
        return cast("nn.Module", own(convert, recurse))
    finally:
        module._parameters.update(sharded)


def refuse_assigned(model: nn.Module) -> None:
    """Refuse `load_state_dict(assign=True)`, whose tensors no forward would use."""
    added = model.register_load_state_dict_pre_hook(_refuse_assigned)
    called: Any = model._load_state_dict_pre_hooks
    called.move_to_end(added.id, last=False)  # torch's own gathers weights


def _refuse_assigned(
    module: nn.Module, state_dict: object, prefix: str, metadata: Mapping[str, Any], *others: object
) -> None:
    if metadata.get("assign_to_params_buffers"):
        raise AccelError(
            f"load_state_dict(assign=True): the weights of this {type(module).__name__} are sharded, and what"
            " takes their place would not be used\n"
            "leave assign out, or load before the optimizer is made and prepare is called"
        )


def _refuse(name: str, kind: str, hook: object) -> NoReturn:
    raise AccelError(f"{name} is sharded, and {kind} of it would never be called\n{ADVICE}")

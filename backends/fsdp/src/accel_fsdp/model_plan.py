"""Plans that transformers' models bring: names of modules and parameters -> words."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

__all__ = ["places", "words_of"]


def places(model: nn.Module) -> dict[str, tuple[nn.Module, str | None]]:
    """Return name -> (module, key of a parameter, or None), in the model's order.

    The parameters of a module come before the module.
    """
    found: dict[str, tuple[nn.Module, str | None]] = {}
    for prefix, module in model.named_modules():
        for key, _ in module.named_parameters(recurse=False):
            found[f"{prefix}.{key}".lstrip(".")] = module, key
        found[prefix] = module, None
    return found


def words_of(model: nn.Module, plan_name: str) -> dict[str, Any]:
    """Return name of a module or parameter -> the word that the model's plan has for it.

    The model has merged the plans of its config, its class and its children. Numbers in names are `*` there.

    plan_name: `tp_plan`, `ep_plan` or `fsdp_plan`.
    """
    merged = f"_{plan_name}"  # wrappers such as PeftModel ask the model inside
    plan: Any = getattr(model, merged, None) or getattr(model, plan_name, None)
    if not isinstance(plan, Mapping):
        return {}
    modules = list(model.named_modules())[1:]
    owner = next((f"{name}." for name, each in modules if vars(each).get(merged) is plan), "")
    words = {}
    for name in places(model):
        own = name.removeprefix(owner)
        words[name] = plan.get(own, plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", own)))
    return {name: word for name, word in words.items() if word is not None}

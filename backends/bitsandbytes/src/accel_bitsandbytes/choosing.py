"""Selection of the layers to quantise, with a reason for each other linear layer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from attrs import frozen
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from accel_core import ConfigError

__all__ = ["Choice", "choose", "default_skip", "is_named", "report"]

_HEAD = "the last module, which is not quantised unless skip_modules is set"


@frozen
class Choice:
    """The linear layers of a model, divided into layers to quantise and layers that stay."""

    chosen: dict[str, nn.Linear]
    """Full name -> layer to quantise."""
    skipped: dict[str, str]
    """Name of a layer that stays, or entry of the config that matches no module -> the reason."""
    kind: str
    """Kind of the quantised weights."""

    def lines(self) -> list[str]:
        """Return one line with the quantised layers, and one line per other layer."""
        return [
            f"{self.kind} by bitsandbytes: {', '.join(name or 'the model' for name in self.chosen)}",
            *(f"not quantised: {name or 'the model'}: {why}" for name, why in self.skipped.items()),
        ]


def choose(model: nn.Module, config: Any) -> Choice:
    """Return the model's linear layers to quantise.

    All exact `nn.Linear`s are quantised except layers named in the config, layers with a tied weight, and, if
    `config.skip_modules` is None, the last module of a model with a head.

    Raises:
        ConfigError: no layer is selected; the message has the reason for each layer.
    """
    ties, skip = _ties(model), config.skip_modules
    head = default_skip(model) if skip is None else []
    fp32 = list(config.keep_in_fp32_modules or ())
    chosen: dict[str, nn.Linear] = {}
    skipped: dict[str, str] = {}
    for name, module in model.named_modules():
        if type(module).__name__ != "Conv1D" and not isinstance(module, nn.Linear):
            continue
        why = _reason(name, module, ties, skip or (), fp32, head)
        if why:
            skipped[name] = why
        else:
            assert isinstance(module, nn.Linear)
            chosen[name] = module
    choice = Choice(chosen, skipped, kind_of(config))
    if not chosen:
        raise ConfigError(
            f"no layer of the {type(model).__name__} would be quantised"
            f" ({'; '.join(choice.lines()[1:]) or 'it has no linear layer'})\n"
            "change skip_modules and keep_in_fp32_modules, or load the model as it is"
        )
    names = [name for name, _ in model.named_modules()]
    for entry in (*(skip or ()), *fp32):
        if not any(is_named(name, [entry]) for name in names):
            skipped[entry] = "named in the config, but the model has no such module"
    return choice


def report(model: nn.Module) -> str:
    """Return a text with the quantised layers, and the reason for each linear layer that is not quantised."""
    choice = getattr(model, "bitsandbytes_choice", None)
    return "\n".join(choice.lines()) if choice is not None else "no layer was quantised here"


def kind_of(config: Any) -> str:
    """Return a description of the quantised weights of a config."""
    if config.load_in_8bit:
        return f"int8 (threshold {config.llm_int8_threshold})"
    return str(config.bnb_4bit_quant_type) + (
        ", scales quantised too" if config.bnb_4bit_use_double_quant else ""
    )


def default_skip(model: nn.Module) -> list[str]:
    """Return the name of the last module in a list; an empty list for a base model of transformers."""
    prefix = getattr(model, "base_model_prefix", None)
    is_base = prefix is not None and not hasattr(model, prefix)
    children = [name for name, _ in model.named_children()]
    return [] if is_base and not _ties(model) else children[-1:]


def is_named(name: str, entries: Collection[str]) -> bool:
    """Return True if an entry equals the name, or consecutive parts of it between dots."""
    return any(f".{entry}." in f".{name}." for entry in entries)


def _reason(
    name: str,
    module: Any,
    ties: Mapping[Tensor, Sequence[str]],
    skip: Collection[str],
    fp32: Collection[str],
    head: Collection[str],
) -> str:
    """Return the reason why a layer is not quantised, or an empty string."""
    if type(module) is not nn.Linear:
        return f"it is a {type(module).__name__}, which has its own forward"
    if "forward" in vars(module):
        return "its forward was replaced on this instance"
    if "weight" not in module._parameters:
        return "its weight is computed by a hook"
    others = [other for other in ties.get(module.weight, ()) if other != f"{name}.weight"]
    reasons = (
        (is_named(name, skip), "named in skip_modules"),
        (is_named(name, fp32), "named in keep_in_fp32_modules"),
        (others, f"its weight is also {', '.join(others)}"),
        (is_named(name, head), _HEAD),
        (
            not module.weight.is_floating_point() or bool(is_traceable_wrapper_subclass(module.weight)),
            f"its weight is a {type(module.weight).__name__} of {module.weight.dtype}",
        ),
    )
    return next((why for applies, why in reasons if applies), "")


def _ties(model: nn.Module) -> dict[Tensor, list[str]]:
    """Return parameter -> its names, for parameters with several names."""
    names: dict[Tensor, list[str]] = {}
    for prefix, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            names.setdefault(parameter, []).append(f"{prefix}.{key}" if prefix else key)
    return {parameter: aliases for parameter, aliases in names.items() if len(aliases) > 1}

"""Plans of tensor parallelism.

Patterns of module names -> how the modules are split.

A style is a word, a mapping `{style, input, output}` with layouts, or an object of
torch.distributed.tensor.parallel. Everything is checked before anything is changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from accel_core import ConfigError
from accel_fsdp.naming import did_you_mean

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

__all__ = ["Planned", "plan_of"]

OPTION: Final = "tensor-parallel.parallelize_plan"
LAYOUTS: Final[Mapping[str, Placement]] = {
    "whole": Replicate(),
    "features": Shard(-1),
    "sequence": Shard(1),
}
"""Layout on the ranks: whole, or split along the last or second dimension."""

WORDS: Final[Mapping[str, Mapping[str, str]]] = {
    "colwise": {"style": "colwise"},
    "rowwise": {"style": "rowwise"},
    "colwise_rep": {"style": "colwise", "output": "whole"},
    "colwise_gather_output": {"style": "colwise", "output": "whole"},
    "rowwise_rep": {"style": "rowwise", "input": "whole"},
    "embedding_colwise": {"style": "colwise", "output": "whole"},
    "embedding_rowwise": {"style": "rowwise"},
    "sequence": {"style": "sequence"},
    "sequence_parallel": {"style": "sequence"},
    "gather": {"style": "gather", "input": "sequence"},
    "replicated_with_grad_allreduce": {"style": "parts"},
}
"""The words that plans are written in, transformers' among them."""


@frozen(eq=False)
class Planned:
    """A module and how it is split.

    `head`: it gives whole logits, of which each rank computes a part.
    """

    name: str
    module: nn.Module
    style: ParallelStyle
    head: bool


def plan_of(
    model: nn.Module, given: Mapping[str, Any] | None, size: int, *, loss_parallel: bool
) -> list[Planned]:
    """Modules to split, in the model's order.

    Raises:
        ConfigError: there is no plan, one of its patterns or styles means nothing here, a weight does
            not divide by `size`, tied weights would be parted, or there is no head to leave split.
    """
    own = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None) or {}
    named, may_be_whole = dict(model.named_modules()), "*" in (given or ())
    for pattern in given or ():
        if not may_be_whole and not any(fnmatchcase(name, pattern) for name in named):
            raise ConfigError(
                f"{OPTION}: {pattern!r} matches no module of this {type(model).__name__}"
                f"{did_you_mean(pattern, named)}\n"
                "correct it; or add '*': null, if it is for another model of this run"
            )
    plan = [*own.items(), *(given or {}).items()]
    found = []
    for name, module in named.items():
        asked = [style for pattern, style in plan if fnmatchcase(name, pattern)]
        if asked and asked[-1] is not None:
            found.append(_planned(name, module, asked[-1], size, loss_parallel=loss_parallel))
    if not found and may_be_whole:
        return []
    if not found:
        raise ConfigError(
            f"parallelism.tp is {size}, but {type(model).__name__} has no tp_plan of its own, and no"
            f" plan was given\nsay how its layers are split: {OPTION}: {{'layers.*.up': colwise, ...}}"
        )
    if loss_parallel and not any(planned.head for planned in found):
        raise ConfigError(
            "tensor-parallel.loss_parallel leaves split what the output layer gives, but the plan has no such"
            f" layer\ngive it the style colwise_rep in {OPTION}"
        )
    _refuse_parted(model, found)
    _refuse_parted_heads(model, found, size)
    return found


def _refuse_parted_heads(model: nn.Module, found: list[Planned], size: int) -> None:
    """Refuse plans that cut a head, which transformers' attention views as whole."""
    config = getattr(model, "config", None)
    heads = {
        "q_proj": "num_attention_heads",
        "k_proj": "num_key_value_heads",
        "v_proj": "num_key_value_heads",
    }
    for planned in found:
        option = heads.get(planned.name.rpartition(".")[2], "")
        count = getattr(config, option, None)
        if isinstance(count, int) and count % size and isinstance(planned.style, ColwiseParallel):
            raise ConfigError(
                f"{planned.name} is split over parallelism.tp {size}, but the model has"
                f" {option} {count}, and no rank can have a part of a head\n"
                f"choose a size that divides {count}"
            )


def _planned(name: str, module: nn.Module, asked: Any, size: int, *, loss_parallel: bool) -> Planned:
    if isinstance(asked, ParallelStyle):
        _refuse_uneven(name, module, asked, size)
        return Planned(name, module, asked, head=False)
    parts = WORDS.get(asked) if isinstance(asked, str) else asked
    styles = ("colwise", "rowwise", "sequence", "gather", "parts")
    known = {"style": styles, "input": LAYOUTS, "output": LAYOUTS}
    if not isinstance(parts, Mapping) or any(parts[key] not in known.get(key, ()) for key in parts):
        raise ConfigError(
            f"{OPTION}: {asked!r} for {name} is not a known style\n"
            f"choose among {', '.join(WORDS)}; a mapping {{style: colwise, input: sequence, output: whole}}"
            f" of the layouts {', '.join(LAYOUTS)}; an object of torch.distributed.tensor.parallel; or null,"
            f" which leaves it whole: {OPTION}: {{{name}: null}}"
        )
    gives_whole = parts.get("style") == "colwise" and parts.get("output") == "whole"
    head = gives_whole and isinstance(module, nn.Linear)
    style = _style(name, module, parts, split_output=head and loss_parallel)
    _refuse_uneven(name, module, style, size)
    return Planned(name, module, style, head=head)


def _style(name: str, module: nn.Module, parts: Mapping[str, str], *, split_output: bool) -> ParallelStyle:
    kind = parts.get("style")
    enters, leaves = (LAYOUTS.get(parts.get(end, "")) for end in ("input", "output"))
    if kind == "sequence":
        return SequenceParallel()
    if kind == "parts":  # a norm of heads; torch must know that it sees a part, but not along which dimension
        return SequenceParallel(sequence_dim=0, use_local_output=True)
    if kind == "gather":
        return PrepareModuleInput(input_layouts=enters or Shard(1), desired_input_layouts=Replicate())
    if not isinstance(module, (nn.Linear, nn.Embedding)):
        raise ConfigError(
            f"{OPTION}: {name} is a {type(module).__name__}, and only Linear and Embedding are split {kind}\n"
            "leave it out, or give an object of torch.distributed.tensor.parallel that can split it"
        )
    if kind == "colwise":
        if split_output:
            return ColwiseParallel(input_layouts=enters, use_local_output=False)
        return ColwiseParallel(input_layouts=enters, output_layouts=leaves)
    whole = Replicate() if isinstance(module, nn.Embedding) else None  # indices are not split
    return RowwiseParallel(input_layouts=enters or whole, output_layouts=leaves)


def _refuse_uneven(name: str, module: nn.Module, style: ParallelStyle, size: int) -> None:
    for key, dim in _cuts(module, style):
        tensor = module._parameters.get(key)
        if tensor is not None and tensor.shape[dim] % size:
            raise ConfigError(
                f"{name}.{key} of shape {tuple(tensor.shape)} is split along dimension {dim}, and"
                f" {tensor.shape[dim]} is not a multiple of parallelism.tp {size}\n"
                f"choose a size that divides it, or leave it whole: {OPTION}: {{{name}: null}}"
            )


def _cuts(module: nn.Module, style: ParallelStyle) -> Iterator[tuple[str, int]]:
    """Parameters of the module and the dimension along which the style splits them."""
    embeds = isinstance(module, nn.Embedding)
    if isinstance(style, ColwiseParallel):
        yield "weight", 1 if embeds else 0
        yield "bias", 0
    elif isinstance(style, RowwiseParallel):
        yield "weight", 0 if embeds else 1


def _refuse_parted(model: nn.Module, found: list[Planned]) -> None:
    """Refuse a tied weight that is split differently in its places.

    It would become two.
    """
    cut: dict[tuple[nn.Module, str], int] = {
        (planned.module, key): dim for planned in found for key, dim in _cuts(planned.module, planned.style)
    }
    first: dict[nn.Parameter, tuple[str, int | None]] = {}
    for prefix, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            here = f"{prefix}.{key}" if prefix else key, cut.get((module, key))
            before = first.setdefault(parameter, here)
            if before[1] != here[1]:
                raise ConfigError(
                    f"{before[0]} and {here[0]} are one weight, but the plan splits them differently\n"
                    f"an embedding with style rowwise and its output layer with colwise_rep go together; or"
                    f" leave both whole: {OPTION}: {{{here[0].rpartition('.')[0]}: null}}"
                )

"""Plans of tensor parallelism.

Patterns of names of modules or parameters -> how they are split.

A style is a word, a mapping `{style, input, output}` with layouts, or an object of
torch.distributed.tensor.parallel. Everything is checked before anything is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import partial
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
from torch.distributed.tensor.placement_types import _StridedShard

from accel_core import ConfigError
from accel_fsdp.experts.stacks import Spread
from accel_fsdp.model_plan import places, words_of
from accel_fsdp.naming import did_you_mean
from accel_fsdp.tensor.styles import Cut, Local, add_up, divide, sum_gradient, sum_gradient_of_last

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

__all__ = ["WORDS", "Planned", "plan_of"]

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
    "rowwise_split_input": {"style": "rowwise", "input": "whole"},
    "packed_colwise": {"style": "packed_colwise"},
    "packed_rowwise": {"style": "packed_rowwise"},
    "embedding_colwise": {"style": "colwise", "output": "whole"},
    "embedding_rowwise": {"style": "rowwise"},
    "sequence": {"style": "sequence"},
    "sequence_parallel": {"style": "sequence"},
    "gather": {"style": "gather", "input": "sequence"},
    "replicated_with_grad_allreduce": {"style": "parts"},
    "replicate": {"style": "whole"},
    "local_params": {"style": "local"},
    "moe_tp_experts": {"style": "summed"},
    "all_reduce": {"style": "summed"},
    "moe_identity_expert": {"style": "divided"},
    "mla_kv_a_proj": {"style": "mla"},
}
"""The words that plans are written in: all of transformers' among them."""

PACKED: Final = 2
"""Weights that a packed one holds, one after the other: gates and values."""
HEADS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("q_proj", "q_b_proj", "kv_b_proj", "query_key_value"), "num_attention_heads"),
    **dict.fromkeys(("k_proj", "v_proj"), "num_key_value_heads"),
}
"""Layers of attention -> the option of a config that says how many heads they have."""


@frozen(eq=False)
class Planned:
    """A module, or one of its parameters, and how it is split.

    `head`: it gives whole logits, of which each rank computes a part.
    """

    name: str
    module: nn.Module
    style: ParallelStyle
    head: bool


def plan_of(
    model: nn.Module, given: Mapping[str, Any] | None, size: int, *, loss_parallel: bool
) -> list[Planned]:
    """Modules and parameters to split, in the model's order.

    Raises:
        ConfigError: there is no plan, one of its patterns or styles means nothing here, a weight does
            not divide by `size`, tied weights would be parted, or there is no head to leave split.
    """
    known, may_be_whole = places(model), "*" in (given or ())
    spread = {each for module in model.modules() if isinstance(module, Spread) for each in module.modules()}
    own = {name: word for name, word in words_of(model, "tp_plan").items() if known[name][0] not in spread}
    asked = dict(own)
    for pattern, style in (given or {}).items():
        names = [name for name in known if fnmatchcase(name, pattern)]
        names = [name for name in names if known[name][1] is None] or names
        if not names and not may_be_whole:
            raise ConfigError(
                f"{OPTION}: {pattern!r} matches no module of this {type(model).__name__}"
                f"{did_you_mean(pattern, known)}\n"
                "correct it; or add '*': null, if it is for another model of this run"
            )
        asked.update(dict.fromkeys(names, style))
        own = {name: word for name, word in own.items() if name not in names}
    _refuse_mixed_weights(model, own)
    found = [
        _planned(model, name, place, asked[name], loss_parallel=loss_parallel)
        for name, place in known.items()
        if asked.get(name) is not None
    ]
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
    _refuse_uneven(found, size)
    _refuse_parted(model, found)
    _refuse_parted_heads(model, found, size)
    _refuse_whole_addends(found)
    return found


def _refuse_parted_heads(model: nn.Module, found: list[Planned], size: int) -> None:
    """Refuse plans that cut a head, which transformers' attention views as whole."""
    for planned in found:
        style, option = planned.style, HEADS.get(planned.name.rpartition(".")[2])
        count = _setting(model, planned.name, option) if option else None
        leaves_split = isinstance(style, ColwiseParallel) and style.output_layouts[0].is_shard()
        if leaves_split and count and count % size:
            raise ConfigError(
                f"{planned.name} is split over parallelism.tp {size}, but the model has"
                f" {option} {count}, and no rank can have a part of a head\n"
                f"choose a size that divides {count}"
            )


def _refuse_mixed_weights(model: nn.Module, own: Mapping[str, Any]) -> None:
    """Refuse a model's plan by which one rank has the gates, and another the values (Inkling)."""
    for name, word in own.items():
        if word == "colwise" and name.endswith("experts.gate_up_proj"):
            raise ConfigError(
                f"the tp_plan of {type(model).__name__} splits {name} colwise: if its gates come before its"
                " values, one rank would have the gates and another the values\n"
                f"say how they lie: {OPTION}: {{{name}: packed_colwise}}, or colwise if they alternate"
            )


def _refuse_whole_addends(found: list[Planned]) -> None:
    """Refuse sums over ranks to which each rank would add a parameter that it has whole."""
    cut = {(planned.module, key) for planned in found for key, _ in _cuts(planned.module, planned.style)}
    sums = [each for each in found if isinstance(each.style, Local) and each.style.outputs is add_up]
    for planned in sums:
        for key, _ in planned.module.named_parameters(recurse=False):
            if (planned.module, key) not in cut:
                raise ConfigError(
                    f"outputs of {planned.name} are summed over the ranks, and its {key} is whole on each\n"
                    f"split it: {OPTION}: {{{planned.name}.{key}: colwise}}; or leave {planned.name} whole"
                )


def _setting(model: nn.Module, name: str, option: str) -> int | None:
    """Return a number that the modules around a module, or their configs, have by this name: the nearest."""
    parts = name.split(".")
    for end in range(len(parts) - 1, -1, -1):
        module = model.get_submodule(".".join(parts[:end]))
        for holder in (module, getattr(module, "config", None)):
            # A config whose layers differ in the option raises RuntimeError.
            with suppress(RuntimeError):
                if isinstance(count := getattr(holder, option, None), int):
                    return count
    return None


def _planned(
    model: nn.Module, name: str, place: tuple[nn.Module, str | None], asked: Any, *, loss_parallel: bool
) -> Planned:
    module, key = place
    if isinstance(asked, ParallelStyle) and key is None:
        return Planned(name, module, asked, head=False)
    parts = WORDS.get(asked) if isinstance(asked, str) else asked
    known = {"style": {word["style"] for word in WORDS.values()}, "input": LAYOUTS, "output": LAYOUTS}
    if not isinstance(parts, Mapping) or any(parts[end] not in known.get(end, ()) for end in parts):
        raise ConfigError(
            f"{OPTION}: {asked!r} for {name} is not a known style\n"
            f"choose among {', '.join(WORDS)}; a mapping {{style: colwise, input: sequence, output: whole}}"
            f" of the layouts {', '.join(LAYOUTS)}; an object of torch.distributed.tensor.parallel; or null,"
            f" which leaves it whole: {OPTION}: {{{name}: null}}"
        )
    if key is not None:
        return Planned(
            name, module, _style_of_parameter(name, module, key, parts.get("style", "")), head=False
        )
    gives_whole = parts.get("style") == "colwise" and parts.get("output") == "whole"
    head = gives_whole and isinstance(module, nn.Linear)
    style = _style(model, name, module, parts, split_output=head and loss_parallel)
    return Planned(name, module, style, head=head)


def _style_of_parameter(name: str, module: nn.Module, key: str, kind: str) -> ParallelStyle:
    """Return the style of a parameter: (..., output, input), or the values of the outputs."""
    dims = module.get_parameter(key).dim()
    rows, columns = max(dims - 2, 0), max(dims - 1, 0)
    styles: dict[str, Mapping[str, Placement]] = {
        "colwise": {key: Shard(rows)},
        "rowwise": {key: Shard(columns)},
        "packed_colwise": {key: _StridedShard(rows, split_factor=PACKED)},
        "packed_rowwise": {key: _StridedShard(columns, split_factor=PACKED)},
        "whole": {},
    }
    if kind not in styles:
        raise ConfigError(
            f"{OPTION}: {name} is a parameter, which cannot be {kind}\n"
            f"choose among {', '.join(styles).replace('whole', 'replicate')}"
        )
    return Cut(styles[kind])


def _style(
    model: nn.Module, name: str, module: nn.Module, parts: Mapping[str, str], *, split_output: bool
) -> ParallelStyle:
    kind = parts.get("style", "")
    enters, leaves = (LAYOUTS.get(parts.get(end, "")) for end in ("input", "output"))
    has_own = any(parameter is not None for parameter in module._parameters.values())
    of_any_module: dict[str, Callable[[], ParallelStyle]] = {
        "sequence": SequenceParallel,
        # A norm of heads; torch must know that it sees a part, but not along which dimension.
        "parts": lambda: SequenceParallel(sequence_dim=0, use_local_output=True),
        "gather": lambda: PrepareModuleInput(
            input_layouts=enters or Shard(1), desired_input_layouts=Replicate()
        ),
        "whole": lambda: Cut({}),
        "local": Local,
        "divided": lambda: Local(inputs=divide),
        # Layers inside the module that are split sum the gradients of their inputs by themselves.
        "summed": lambda: Local(inputs=sum_gradient if has_own else None, outputs=add_up),
        # A latent vector, for layers that are split, and then a key, which meets this rank's heads only.
        "mla": lambda: Local(outputs=partial(sum_gradient_of_last, _width_of_key(model, name))),
    }
    if kind in of_any_module:
        return of_any_module[kind]()
    inner = any("." in key for key, _ in module.named_parameters())  # a norm, for example
    if not isinstance(module, (nn.Linear, nn.Embedding)) or inner or kind == "packed_rowwise":
        raise ConfigError(
            f"{OPTION}: {name} is a {type(module).__name__}{' with weights inside' if inner else ''}, and"
            f" only Linear and Embedding are split {kind}\n"
            f"leave it whole: {OPTION}: {{{name}: null}}; or give an object of"
            " torch.distributed.tensor.parallel that can split it"
        )
    if kind == "packed_colwise":
        packed = _StridedShard(0, split_factor=PACKED)
        return Local({"weight": packed, "bias": packed}, inputs=sum_gradient)
    if kind == "colwise":
        if split_output:
            return ColwiseParallel(input_layouts=enters, use_local_output=False)
        return ColwiseParallel(input_layouts=enters, output_layouts=leaves)
    whole = Replicate() if isinstance(module, nn.Embedding) else None  # indices are not split
    return RowwiseParallel(input_layouts=enters or whole, output_layouts=leaves)


def _width_of_key(model: nn.Module, name: str) -> int:
    width = _setting(model, name, "qk_rope_head_dim")
    if width is None:
        raise ConfigError(
            f"{OPTION}: mla_kv_a_proj for {name} needs qk_rope_head_dim, and no config of this"
            f" {type(model).__name__} has it\nset it, or leave the layer whole: {OPTION}: {{{name}: null}}"
        )
    return width


def _refuse_uneven(found: list[Planned], size: int) -> None:
    for planned in found:
        for key, placement in _cuts(planned.module, planned.style):
            tensor, dim = planned.module._parameters.get(key), placement.dim
            pieces = getattr(placement, "split_factor", 1)
            if tensor is not None and tensor.shape[dim] % (size * pieces):
                name = f"{planned.name.removesuffix(f'.{key}')}.{key}"
                raise ConfigError(
                    f"{name} of shape {tuple(tensor.shape)} is split along"
                    f" dimension {dim}, and {tensor.shape[dim]} is not a multiple of"
                    f" {f'{pieces} packed weights x ' if pieces > 1 else ''}parallelism.tp {size}\n"
                    f"choose a size that divides it, or leave it whole: {OPTION}: {{{planned.name}: null}}"
                )


def _cuts(module: nn.Module, style: ParallelStyle) -> Iterator[tuple[str, Any]]:
    """Yield the parameters of the module that the style splits, and how it lays them out."""
    embeds = isinstance(module, nn.Embedding)
    if isinstance(style, ColwiseParallel):
        yield "weight", Shard(1 if embeds else 0)
        yield "bias", Shard(0)
    elif isinstance(style, RowwiseParallel):
        yield "weight", Shard(0 if embeds else 1)
    elif isinstance(style, Cut):
        yield from style.placements.items()


def _refuse_parted(model: nn.Module, found: list[Planned]) -> None:
    """Refuse a tied weight that is split differently in its places.

    It would become two.
    """
    cut = {
        (planned.module, key): how for planned in found for key, how in _cuts(planned.module, planned.style)
    }
    first: dict[nn.Parameter, tuple[str, Any]] = {}
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

"""Optimizer state that wraps other tensors, such as quantised moments.

A wrapper under `KEY` is stored as its parts, `KEY#PART`. In a sharded DTensor each rank has a wrapper of its
own, stored as `KEY#PART@OFFSET`: a load can restore it if the parameter is sharded at the same offsets.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from inspect import unwrap
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accel_core.contract.state import Leaf, TensorTemplate, full_leaf
from accel_core.storage.leaves import parts_of, wraps

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

Template = Mapping[str, TensorTemplate]
"""Key -> stored tensor of one parameter."""


def part_leaves(key: str, value: Any) -> dict[str, Leaf]:
    """Return the leaves of a wrapper's parts; empty for other tensors."""
    suffix = place = ""
    if hasattr(value, "device_mesh"):
        value, dtensor = value.to_local(), value
        if wraps(value) and value.shape != dtensor.shape:
            (chunk,) = dtensor.__create_chunk_list__()
            suffix = f"@{','.join(map(str, chunk.offsets))}"
            place = f" at {list(chunk.offsets)} of {list(dtensor.shape)}"
    if not wraps(value):
        return {}
    return {
        f"{key}#{name}{suffix}": full_leaf(part, kind="opaque", layout=layout + place)
        for name, part, layout in parts_of(value)
    }


def refusals(
    optimizer: Optimizer, names: Mapping[int, str], templates: Mapping[str, Template]
) -> Sequence[str]:
    """Return the reasons why stored wrappers cannot be restored; `names` are by the id of a parameter."""
    reasons = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            stored = _stored_wrappers(templates.get(name, {}))
            fitting = _fitting(optimizer, group, parameter, stored)
            for key in [key for key in stored if key not in fitting]:
                layouts = sorted({str(part.layout) for part in stored[key].values()})
                reasons.append(
                    f"{name}/{key} was saved as {' and '.join(layouts)}, and the optimizer makes another"
                    " state here; resume with the same options of the optimizer and the same number of ranks"
                )
    return reasons


def take_wrappers(
    optimizer: Optimizer, group: Mapping[str, Any], parameter: nn.Parameter, template: Template
) -> tuple[Mapping[str, Tensor], Template]:
    """Return key -> a wrapper that the stored parts fit, and the template without the parts of wrappers."""
    stored = _stored_wrappers(template)
    rest = {name: each for name, each in template.items() if name.partition("#")[0] not in stored}
    return _fitting(optimizer, group, parameter, stored), rest


def _stored_wrappers(template: Template) -> dict[str, dict[str, TensorTemplate]]:
    """Return key -> the stored parts, from all ranks, of the wrapper under the key."""
    found: dict[str, dict[str, TensorTemplate]] = {}
    for name, part in template.items():
        if "#" in name and part.kind == "opaque":
            found.setdefault(name.partition("#")[0], {})[name] = part
    return found


def _fitting(
    optimizer: Optimizer, group: Mapping[str, Any], parameter: nn.Parameter, stored: Mapping[str, Template]
) -> dict[str, Tensor]:
    """Return key -> a wrapper that its stored parts fit, from the parameter's state or newly made."""
    here = dict(optimizer.state[parameter]) if parameter in optimizer.state else {}
    if not all(_fits(key, here.get(key), parts) for key, parts in stored.items()):
        here |= _first_state(optimizer, group, parameter)
    return {key: here[key] for key, parts in stored.items() if _fits(key, here.get(key), parts)}


def of_this_rank(stored: Mapping[str, Any], leaves: Iterable[str]) -> dict[str, Any]:
    """Return the stored tensors without the parts of wrappers that other ranks hold."""
    known = frozenset(leaves)
    cut = {_uncut(key) for key in known} - {""}
    return {key: each for key, each in stored.items() if key in known or _uncut(key) not in cut}


def _uncut(key: str) -> str:
    """Return the key of a part without its offset; "" for the key of another tensor."""
    owner, slash, name = key.rpartition("/")
    part, _, offset = name.rpartition("@")
    return f"{owner}{slash}{part}" if offset and "#" in part else ""


def _fits(key: str, value: Any, wanted: Template) -> bool:
    """Return whether the value is a wrapper whose parts have the stored layouts and shapes."""
    leaves = part_leaves(key, value) if isinstance(value, Tensor) else {}
    here = {name: (leaf.layout, leaf.global_shape) for name, leaf in leaves.items()}
    return bool(here) and here == {
        name: (part.layout, part.global_shape) for name, part in wanted.items() if name in here
    }


@torch.no_grad()
def _first_state(
    optimizer: Optimizer, group: Mapping[str, Any], parameter: nn.Parameter
) -> Mapping[str, Any]:
    """Return the state that the optimizer makes in the first step of such a parameter.

    Only the optimizer knows how it quantises a parameter. The optimizer steps a stand-in of zeros, without
    hooks, so that no weight and no count of steps changes.
    """
    stand_in = torch.nn.Parameter(torch.zeros_like(parameter))
    stand_in.grad = torch.zeros_like(parameter)
    values = deepcopy({key: value for key, value in group.items() if key != "params"})
    held = optimizer.param_groups, optimizer.state
    optimizer.param_groups, optimizer.state = [{**values, "params": [stand_in]}], defaultdict(dict)
    try:
        unwrap(type(optimizer).step)(optimizer)
        made: Mapping[str, Any] = optimizer.state[stand_in]
    finally:
        optimizer.param_groups, optimizer.state = held
    return made

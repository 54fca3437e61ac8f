"""A trial of optimizers: does one treat each element of its weights by itself?"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.optim import Optimizer

_STEPS: Final = 10
"""So many that moments are more than the last gradient."""
_LEAST_RATE: Final = 1e-2
"""Lower ones are raised: rounding would leave too little of their steps."""


def is_elementwise(optimizer: Optimizer, device: torch.device | str = "cpu") -> bool | None:
    """Tell whether an optimizer treats each element of its weights by itself.

    Only then may ranks step flat pieces of them. An attribute `elementwise` of the optimizer says it. Else a
    copy of the optimizer steps small weights, and two more step half of each. It, its weights and random
    numbers stay as they are.

    device: where it will step.

    Returns None where it cannot be tried: it needs a closure, say, or more than gradients, or it has a
    `__del__`, so that a copy of it could give back what is not the copy's.
    """
    said = getattr(optimizer, "elementwise", None)
    if said is not None or hasattr(optimizer, "__del__"):
        return None if said is None else bool(said)
    used = torch.device(device)
    whole = None
    try:
        with (
            warnings.catch_warnings(),
            torch.random.fork_rng([] if used.type == "cpu" else [used], device_type=used.type),
        ):
            warnings.simplefilter("ignore")
            begun = _stepped(optimizer, used, 0, None)
            whole = _stepped(optimizer, used, _STEPS, None)
            halves = [_stepped(optimizer, used, _STEPS, half) for half in (0, 1)]
    except Exception:  # other people's code, of any kind
        return None if whole is None else False
    moved = apart = 0.0
    for before, after, *pieces in zip(begun, whole, *halves, strict=True):
        moved = max(moved, float((after - before).abs().max()))
        apart = max(apart, float((after - torch.cat(pieces)).abs().max()))
    return apart <= 1e-3 * moved if moved else None


def _stepped(optimizer: Optimizer, device: torch.device, steps: int, half: int | None) -> list[Tensor]:
    """Return small weights (flat), one of each kind, that a copy has stepped."""
    chosen: dict[Any, tuple[Tensor, list[Tensor]]] = {}
    stand_ins: dict[int, Any] = {}
    for group in optimizer.param_groups:
        settings = _settings(group)
        for parameter in group["params"]:
            kind = settings, parameter.ndim, parameter.dtype
            if kind not in chosen:
                values, *gradients = (_part(each, half) for each in _values(parameter, len(chosen), steps))
                chosen[kind] = values.to(device).requires_grad_(), gradients
            stand_ins[id(parameter)] = chosen[kind][0]
    own = {name: value for name, value in vars(optimizer).items() if name not in ("state", "step")}
    tried = object.__new__(type(optimizer))
    vars(tried).update(deepcopy(own, stand_ins), state=defaultdict(dict))
    groups = {_settings(group): group for group in tried.param_groups}
    tried.param_groups = list(groups.values())
    for settings, group in groups.items():
        group["params"] = [weight for (own, *_), (weight, _) in chosen.items() if own == settings]
        if group.get("lr") is not None and group["lr"] < _LEAST_RATE:
            group["lr"] = group["lr"] * 0 + _LEAST_RATE
    step: Any = type(optimizer).step
    step = step.__wrapped__ if getattr(step, "hooked", False) else step  # torch's own would call hooks
    for number in range(steps):
        for weight, gradients in chosen.values():
            weight.grad = gradients[number].to(device)
        step(tried)
    return [weight.detach().flatten() for weight, _ in chosen.values()]


def _settings(group: Mapping[str, Any]) -> str:
    """Return in words how a group steps: all but which weights, and how far."""
    return repr([item for item in group.items() if item[0] not in ("params", "lr", "initial_lr", "name")])


def _values(like: Tensor, seed: int, steps: int) -> list[Tensor]:
    """Make a small weight, and its gradients.

    The first is orthogonal to it, row by row: some optimizers look for that.
    """
    shape = (8,) if like.ndim < 2 else (4, 6, *[2] * (like.ndim - 2))
    drawn = torch.Generator().manual_seed(seed)
    dtype = like.dtype if like.dtype.itemsize > 2 else torch.float32
    weight, *gradients = (torch.randn(shape, generator=drawn, dtype=dtype) for _ in range(steps + 1))
    if gradients:
        left, right = weight.view(-1, 2).unbind(1)
        gradients[0] = torch.stack([right, -left], 1).view(shape)
    larger = torch.linspace(1, 3, weight.numel()).view(shape)  # gradients differ in size, as a model's do
    return [weight, *gradients[:1], *(gradient * larger for gradient in gradients[1:])]


def _part(tensor: Tensor, half: int | None) -> Tensor:
    """Return a copy of all of a tensor, or of a half as a flat piece."""
    return tensor.clone() if half is None else tensor.flatten().chunk(2)[half].clone()

"""A trial of optimizers: does one treat each element of its weights by itself?"""

from __future__ import annotations

import random
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from copy import deepcopy
from math import isfinite
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor

from accel_core.errors import AccelError

if TYPE_CHECKING:
    from torch.optim import Optimizer

_FEW: Final = 16
"""So many groups keep their places, by which an optimizer may tell them apart."""
_STEPS: Final = 10
"""So many that moments are more than the last gradient."""
_ASIDE: Final = frozenset({"params", "param_names", "lr", "initial_lr", "name"})
"""Keys in which many groups may differ, and step alike."""
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

    Raises:
        AccelError: the copy's step has changed the weights, which it reaches by another way.
    """
    said = getattr(optimizer, "elementwise", None)
    if said is not None or hasattr(optimizer, "__del__"):
        return None if said is None else bool(said)
    used = torch.device(device)
    whole = None
    weights = [weight for group in getattr(optimizer, "param_groups", ()) for weight in group["params"]]
    versions = [weight._version for weight in weights]
    streams = random.getstate(), np.random.get_state()  # noqa: NPY002 - the global stream
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
    finally:
        random.setstate(streams[0])
        np.random.set_state(streams[1])  # noqa: NPY002
        if versions != [weight._version for weight in weights]:
            raise AccelError(
                f"prepare: to tell whether a {type(optimizer).__name__} treats each element by itself, a copy"
                " of it stepped small weights, and changed the model's, which it reaches by another way\n"
                "build the model anew, and set optimizer.elementwise = True, or False if it does not"
            )
    told = None
    for before, after, *pieces in zip(begun, whole, *halves, strict=True):  # each moves by a rate of its own
        moved = float((after - before).abs().max())
        if moved and isfinite(moved):
            told = float((after - torch.cat(pieces)).abs().max()) <= 1e-3 * moved
            if not told:
                break
    return told


def _stepped(optimizer: Optimizer, device: torch.device, steps: int, half: int | None) -> list[Tensor]:
    """Return small weights (flat), one of each kind, that a copy has stepped."""
    chosen: dict[Any, tuple[Tensor, list[Tensor]]] = {}
    stand_ins: dict[int, Any] = {}
    firsts: dict[Any, int] = {}
    few = len(optimizer.param_groups) <= _FEW
    for number, group in enumerate(optimizer.param_groups):
        settings = number if few else _settings(group)
        firsts.setdefault(settings, number)
        for parameter in group["params"]:
            kind = settings, parameter.ndim, parameter.dtype
            if kind not in chosen:
                values, *gradients = (_part(each, half) for each in _values(parameter, len(chosen), steps))
                chosen[kind] = values.to(device).requires_grad_(), gradients
            stand_ins[id(parameter)] = chosen[kind][0]
    own = {name: value for name, value in vars(optimizer).items() if name not in ("state", "step")}
    own |= {name: OrderedDict() for name in own if name.startswith("_optimizer_") and name.endswith("_hooks")}
    tried = object.__new__(type(optimizer))
    vars(tried).update(deepcopy(own, stand_ins), state=defaultdict(dict))
    groups = {settings: tried.param_groups[number] for settings, number in firsts.items()}
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
    return repr([item for item in group.items() if item[0] not in _ASIDE])


def _values(like: Tensor, seed: int, steps: int) -> list[Tensor]:
    """Make a small weight, and its gradients.

    The first gradient is orthogonal to it, row by row, and the last much larger: some optimizers look for
    that. Hardly a model has weights of this shape, so that what an optimizer keeps of those does not fit.
    """
    shape = (22,) if like.ndim < 2 else (6, 14, *[2] * (like.ndim - 2))
    drawn = torch.Generator().manual_seed(seed)
    dtype = like.dtype if like.dtype.itemsize > 2 else torch.float32
    weight, *gradients = (torch.randn(shape, generator=drawn, dtype=dtype) for _ in range(steps + 1))
    if gradients:
        left, right = weight.view(-1, 2).unbind(1)
        gradients[0] = torch.stack([right, -left], 1).view(shape)
    larger = torch.linspace(1, 3, weight.numel()).view(shape)  # gradients differ in size, as a model's do
    gradients[1:] = [gradient * larger for gradient in gradients[1:]]
    gradients[-1:] = [gradient * 100 for gradient in gradients[-1:]]
    return [weight, *gradients]


def _part(tensor: Tensor, half: int | None) -> Tensor:
    """Return a copy of all of a tensor, or of a half as a flat piece."""
    return tensor.clone() if half is None else tensor.flatten().chunk(2)[half].clone()

"""Comparison of gradients of whole parameters on ranks that split layers.

A module that works on a rank's part of a sequence, or of heads, sees a part of the gradient. Unless the plan
says so, nothing sums these parts, and each rank trains weights of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

import torch
from torch.distributed.tensor import DTensor

from accel_core import AccelError, before_step
from accel_fsdp.sharding.dims import replica_names

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from accel_core import Run, Unit

__all__ = ["before_update", "compare_gradients", "refuse_whole_inputs"]

TIMES: Final = 2
"""Comparisons of a gradient that is not zero."""
SAMPLE: Final = 2**16
"""Elements of a gradient that are compared, besides its norm."""
TOLERANCE: Final = 0.05
"""Part of its norm by which a gradient may differ: devices may sum in any order."""
NEGLIGIBLE: Final = 64.0
"""Rounding errors of the norm of all gradients; a smaller one may be only errors."""


def compare_gradients(unit: Unit, optimizer: Optimizer) -> None:
    """Have ranks compare gradients of whole parameters in an optimizer's first steps.

    Such a step raises AccelError where ranks that split layers differ.
    """
    names = replica_names(unit.mesh) if unit.mesh is not None else []
    comparisons = [_Comparison(unit, name) for name in names]

    def compare(optimizer: Optimizer) -> None:
        for comparison in comparisons:
            comparison.step(optimizer)

    if names:
        before_update(optimizer, compare)


def before_update(optimizer: Optimizer, check: Callable[[Optimizer], None]) -> None:
    """Call `check` before each step of the optimizer; in a step with a closure, after the closure."""

    def hook(optimizer: Optimizer, arguments: Sequence[Any], keywords: dict[str, Any]) -> Any:
        closure = arguments[1] if len(arguments) > 1 else keywords.get("closure")
        if closure is None:
            return check(optimizer)

        def checked() -> Any:  # gradients are there when a closure has run
            loss = closure()
            check(optimizer)
            return loss

        if len(arguments) > 1:
            return (arguments[0], checked, *arguments[2:]), keywords
        return arguments, {**keywords, "closure": checked}

    before_step(optimizer, hook)


def refuse_whole_inputs(run: Run, name: str, module: nn.Module, called: str) -> None:
    """Have ranks compare the first gradients of a module that works on parts.

    Gradients that are the same on all ranks of the dimension are of no parts, and their sum is too large.
    """
    left = TIMES

    def compare(gradient: Tensor) -> None:
        nonlocal left
        if not left:
            return
        left -= 1
        ranks, mine = run.collectives(name), _digest(gradient).to(run.device)
        first, *others = ranks.all_gather(mine).view(ranks.size, -1).tolist()
        if first[0] and all(other == first for other in others):
            raise AccelError(
                f"tensor-parallel.parallelize_plan: {called} has the style of modules that work on a part of"
                f" their input, but its input is the same on all ranks of {name}: gradients of its weights"
                f" would be {ranks.size} times too large\n"
                f"leave it whole: {{{called}: null}}"
            )

    def watch(module: nn.Module, inputs: Any, output: Any) -> None:
        if not left or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        if any(parameter.requires_grad for parameter in module.parameters()):
            output.register_hook(compare)

    module.register_forward_hook(watch)


class _Comparison:
    """Comparisons by the ranks along one dimension.

    A parameter takes part in the first steps in which it is trained, and again at the fourth, the eighth, ...
    until it had gradients, which frozen ones and branches that begin at zero have late.
    """

    def __init__(self, unit: Unit, name: str) -> None:
        self.unit, self.name = ref(unit), name
        self.steps: dict[Tensor, int] = {}
        """Steps of a parameter that is to be compared."""
        self.left: dict[Tensor, int] = {}
        """Comparisons that a parameter has to pass yet."""

    def step(self, optimizer: Optimizer) -> None:
        unit, due = self.unit(), []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and self.left.get(parameter, TIMES):
                    steps = self.steps[parameter] = self.steps.get(parameter, 0) + 1
                    if not steps & (steps - 1):
                        due.append(parameter)
        if due and unit is not None:
            split = {parameter for parameter in due if _is_split(parameter, self.name)}
            self.left.update(dict.fromkeys(split, 0))
            for parameter in _compare(unit, self.name, [each for each in due if each not in split]):
                self.left[parameter] = self.left.get(parameter, TIMES) - 1


def _is_split(parameter: Tensor, name: str) -> bool:
    return isinstance(parameter, DTensor) and name in (parameter.device_mesh.mesh_dim_names or ())


def _compare(unit: Unit, name: str, parameters: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the parameters that ranks compared; raise if gradients differ.

    Others have gradients that are missing, zero or not finite. Collective over the dimension.
    """
    if not parameters:
        return ()
    ranks = unit.run.collectives(name)
    mine = torch.stack([_digest(parameter.grad).to(unit.run.device) for parameter in parameters])
    found = ranks.all_gather(mine).view(ranks.size, *mine.shape).transpose(0, 1).tolist()
    norms = [max(digest[0] for digest in digests) for digests in found]
    least = _rounding(unit, parameters) * math.hypot(*(norm for norm in norms if math.isfinite(norm)))
    compared: list[Tensor] = []
    apart: list[Tensor] = []
    for parameter, digests, norm in zip(parameters, found, norms, strict=True):
        if least < norm < math.inf:
            (apart if _differ(digests, TOLERANCE * norm) else compared).append(parameter)
    if not apart:
        return compared
    named = ", ".join([key for key, each in unit.named_parameters().items() if any(each is p for p in apart)])
    raise AccelError(
        f"unit {unit.name!r}: gradients of {named} differ on the ranks of {name}, which have these parameters"
        " whole and would train them apart\n"
        "where their module works on parts of sequences, heads or features, give it the style sequence or"
        " replicated_with_grad_allreduce in tensor-parallel.parallelize_plan; otherwise see that these ranks"
        " compute the same, random numbers included"
    )


def _rounding(unit: Unit, parameters: Sequence[Tensor]) -> float:
    """Return the part of a norm that may be rounding errors."""
    dtypes = {parameter.dtype for parameter in parameters if parameter.dtype.is_floating_point}
    coarsest = max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)
    return min(1e-3, NEGLIGIBLE * coarsest) if unit.run.config.mixed_precision == "no" else 1e-3


def _digest(gradient: Tensor | None) -> Tensor:
    """Return the norm of a gradient and two sums of a sample; -1 for none."""
    if gradient is None:
        return torch.full((3,), -1.0)
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    values = local.detach().coalesce().values() if local.is_sparse else local.detach()
    flat = (values.abs() if values.is_complex() else values).reshape(-1)
    sample = flat[:: max(1, flat.numel() // SAMPLE)].float()
    angles = torch.arange(sample.numel(), device=sample.device, dtype=torch.float32)
    norm = flat.norm(dtype=torch.float64 if flat.dtype == torch.float64 else torch.float32).float()
    return torch.stack([norm, sample @ angles.cos(), sample @ angles.sin()])


def _differ(digests: Sequence[Sequence[float]], tolerance: float) -> bool:
    return any(
        abs(here - there) > tolerance
        for digest in digests[1:]
        for here, there in zip(digests[0], digest, strict=True)
    )

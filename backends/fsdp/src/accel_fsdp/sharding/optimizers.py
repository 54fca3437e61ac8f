"""Checks that an optimizer computes the same with parts of weights.

An optimizer says so by an attribute, `elementwise`; else its class is known by name.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

__all__ = ["refused"]

OF_A_MODEL: Final = re.compile(r"(?i).*(lbfgs|prodigy|dadapt).*|sam|adaptivesam")
"""Optimizers that compute one number from all parameters, such as a norm."""
OF_A_TENSOR: Final = re.compile(
    r"(?i).*(adafactor|muon|shampoo|galore|novograd|k_?fac|psgd).*"
    r"|(fused|nv|distributed)?(lamb|lars|larc)(v\d)?|soap|came|kron|sm3|adam_?mini|apollo|scion|dion"
)
"""Optimizers that compute with whole weights: norms, rows, columns, matrices."""
NOT_FOR_DTENSORS: Final = {"Adafactor": "take AdamW, or strategy ddp", "Rprop": "set fsdp.fsdp_version: 1"}
"""Optimizers with operations that torch lacks for DTensors -> remedy."""


def refused(
    optimizers: Sequence[Optimizer],
    version: int,
    names: Mapping[Tensor, str],
    *,
    shards: int,
    cuts: bool,
    stages: bool,
) -> Iterator[str]:
    """Reasons against each optimizer, each with its remedy.

    names: of weights. shards: the ranks over which a weight is sharded by its rows. cuts: several ranks share
    a weight. stages: ranks have weights that others lack.
    """
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if getattr(optimizer, "elementwise", False):
            continue
        if version == 2 and (advice := _first(optimizer, NOT_FOR_DTENSORS)):
            yield f"{name} does not work on parameters of fsdp_version 2\n{advice}"
        elif version == 2 and (few := _with_few_rows(optimizer, shards)):
            yield (
                f"{name} cannot add to the rows of {names.get(few[0], 'a weight')} {[*few[0].shape]}, which"
                f" are sharded over {shards} ranks, so that some have none"
                + f" ({len(few)} such weights)"
                * (len(few) > 1)
                + "\ngive it to another optimizer, such as AdamW, as is usual for the last layer; or choose"
                " strategy ddp"
            )
        elif (cuts or stages) and (_needs_closure(optimizer) or _is(optimizer, OF_A_MODEL)):
            if version == 1 or stages or _needs_closure(optimizer):
                yield (
                    f"{name} computes with all weights of a model at once, of which each rank has a part\n"
                    "take an optimizer that treats each element by itself, such as AdamW, or strategy ddp; if"
                    f" this {name} does, set its attribute: optimizer.elementwise = True"
                )
        elif version == 1 and cuts and _is(optimizer, OF_A_TENSOR):
            other = "" if _first(optimizer, NOT_FOR_DTENSORS) else "set fsdp.fsdp_version: 2, or "
            yield (
                f"{name} computes with whole weights, of which fsdp_version 1 gives each rank a flat piece\n"
                f"{other}take strategy ddp; if this {name} treats each element by itself, set its attribute:"
                " optimizer.elementwise = True"
            )


def _is(optimizer: Optimizer, names: re.Pattern[str]) -> bool:
    return any(names.fullmatch(kind.__name__) for kind in type(optimizer).__mro__)


def _first(optimizer: Optimizer, advice: dict[str, str]) -> str | None:
    return next((advice[kind.__name__] for kind in type(optimizer).__mro__ if kind.__name__ in advice), None)


def _with_few_rows(optimizer: Optimizer, shards: int) -> list[Tensor]:
    """Return the weights that torch cannot change by whole matrices, as of Muon: ranks without a row."""
    if not any(kind.__name__ == "Muon" for kind in type(optimizer).__mro__):
        return []
    return [p for group in optimizer.param_groups for p in group["params"] if len(p) < shards]


def _needs_closure(optimizer: Optimizer) -> bool:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty

"""Options of section `fp8_te`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from attrs import frozen

from accel_core import KwargsHandler, option

__all__ = ["TransformerEngineConfig"]

DELAYED = ("margin", "amax_history_len", "amax_compute_algo", "reduce_amax")
"""Options that only delayed scaling has."""


@frozen(kw_only=True)
class TransformerEngineConfig(KwargsHandler):
    """Options of float8 training by Transformer Engine. Section `fp8_te`."""

    recipe: str = option(
        "auto",
        choices=("auto", "delayed", "current", "mxfp8", "block", "nvfp4"),
        help="Scales from earlier steps, per tensor, per 32 or 128 elements, or 4-bit; auto: the chip's.",
    )
    format: str | None = option(
        None, choices=("HYBRID", "E4M3"), help="E4M3, or HYBRID: gradients in E5M2; unset: the recipe's own."
    )
    margin: int | None = option(None, help="Delayed scaling: divide scales by two to this power.")
    amax_history_len: int | None = option(None, minimum=1, help="Delayed scaling: steps remembered.")
    amax_compute_algo: str | None = option(
        None,
        choices=("max", "most_recent"),
        help="Delayed scaling: the largest, or the last one.",
    )
    reduce_amax: bool | None = option(None, help="Delayed scaling: all ranks have the same scales.")
    high_precision_backward: bool = option(
        False, help="Compute gradients in bfloat16, from inputs and weights before their rounding to float8."
    )
    in_evaluation: bool = option(
        False, help="Compute in float8 also if no model of the unit is in training mode."
    )
    norms: bool = option(True, help="Also convert LayerNorm and RMSNorm, to Transformer Engine's kernels.")
    pad_tokens: bool = option(False, help="Pad numbers of tokens that the recipe cannot multiply.")
    only: str | None = option(None, help="Pattern of whole layer names; other layers stay as they are.")
    skip: str | None = option(None, help="Pattern of whole layer names that stay as they are.")
    filter: Callable[..., bool] | None = option(
        None, python_only=True, help="filter(layer, name): False keeps a layer as it is."
    )
    fused: Mapping[str, Callable[..., Any]] | None = option(
        None, python_only=True, help="Pattern of whole module names -> function(module) that returns another."
    )
    te_recipe: Any = option(
        None, python_only=True, help="A recipe of Transformer Engine instead of recipe, format and scaling."
    )

    def __attrs_post_init__(self) -> None:
        self._check_patterns()
        options = [name for name in (*DELAYED, "format") if getattr(self, name) is not None]
        options += ["high_precision_backward"] * self.high_precision_backward
        if self.te_recipe is not None and (options or self.recipe != "auto"):
            raise ValueError(
                f"fp8_te.te_recipe is set together with {', '.join(options) or 'recipe'}, which it replaces"
                "\nset these in the recipe, or leave the recipe out"
            )
        delayed = [name for name in options if name in DELAYED]
        if delayed and self.recipe not in ("auto", "delayed"):
            raise ValueError(
                f"fp8_te.{delayed[0]} is set, but recipe {self.recipe} has no history of maxima"
                "\nset fp8_te.recipe: delayed, or leave the option out"
            )

    def _check_patterns(self) -> None:
        for name, pattern in (
            ("only", self.only),
            ("skip", self.skip),
            *(("fused", p) for p in self.fused or ()),
        ):
            try:
                re.compile(pattern or "")
            except re.error as error:
                raise ValueError(
                    f"fp8_te.{name}: {pattern!r} is not a regular expression: {error}\nescape it, or fix it"
                ) from None

    @property
    def asks_for_delayed(self) -> bool:
        """True if an option is set that only delayed scaling has."""
        return any(getattr(self, name) is not None for name in DELAYED)

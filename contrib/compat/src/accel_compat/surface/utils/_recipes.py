"""Recipes for fp8: they are made as in Accelerate, and refused by the Accelerator until fp8 has a package."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from accel_compat.refusing import NotServedError

from ._handlers import KwargsHandler


class _Recipe(KwargsHandler):
    def to_ours(self) -> object:
        raise NotServedError(
            f"{type(self).__name__}: fp8 comes in a later package of accel-core\n"
            'leave it out, and train with mixed_precision="bf16" meanwhile'
        )


@dataclass
class AORecipeKwargs(_Recipe):
    """fp8 by torchao."""

    config: Any = None
    module_filter_func: Callable[..., Any] | None = None
    pad_inner_dim: bool | None = None
    enable_fsdp_float8_all_gather: bool | None = None


@dataclass
class TERecipeKwargs(_Recipe):
    """fp8 by Transformer Engine."""

    use_autocast_during_eval: bool | None = None
    margin: int | None = None
    interval: int | None = None
    fp8_format: Literal["HYBRID", "E4M3", "E5M2"] | None = None
    amax_history_len: int | None = None
    amax_compute_algo: Literal["max", "most_recent"] | None = None
    override_linear_precision: tuple[bool, bool, bool] | None = None
    use_mxfp8_block_scaling: bool | None = None


@dataclass
class MSAMPRecipeKwargs(_Recipe):
    """fp8 by MS-AMP."""

    opt_level: Literal["O1", "O2"] | None = None


@dataclass
class FP8RecipeKwargs(TERecipeKwargs, MSAMPRecipeKwargs):
    """The older name for the two together."""

    backend: Literal["MSAMP", "TE"] | None = None

    def __post_init__(self) -> None:
        if self.backend is not None:
            self.backend = self.backend.upper()  # type: ignore[assignment]
            if self.backend not in ("MSAMP", "TE"):
                raise ValueError("`backend` must be 'MSAMP' or 'TE' (TransformerEngine)")

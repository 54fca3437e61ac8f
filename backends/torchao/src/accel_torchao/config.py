"""Options of section `fp8_torchao`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from attrs import frozen

from accel_core import KwargsHandler, option

__all__ = ["Float8Config"]

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


@frozen(kw_only=True)
class Float8Config(KwargsHandler):
    """Options of float8 training by torchao. Section `fp8_torchao`."""

    recipe: str = option(
        "tensorwise",
        choices=RECIPES,
        help="Scales per matrix, per row, or per row with weight gradients in bfloat16.",
    )
    only: str | None = option(None, help="Pattern of whole layer names; other layers stay as they are.")
    skip: str | None = option(None, help="Pattern of whole layer names that stay as they are.")
    min_features: int = option(
        0, minimum=0, help="Layers with fewer in_features or out_features stay as they are."
    )
    multiple_of: int = option(
        16, minimum=1, help="Layers whose features are not multiples of this stay; GPUs need 16, CPUs 1."
    )
    first_and_last: bool = option(False, help="Also convert the model's first and last linear layer.")
    filter: Callable[..., bool] | None = option(
        None, python_only=True, help="filter(layer, name): False keeps a layer as it is."
    )
    all_gather: bool = option(
        False, help="Gather weights in float8; needs recipe tensorwise and a strategy that shards by tensors."
    )
    pad_inner_dim: bool = option(
        False, help="Pad the inner dimension of products to a multiple of 16; allows odd numbers of tokens."
    )
    emulate: bool = option(False, help="Compute in high precision with values rounded to float8; slow.")
    config: Any = option(
        None, python_only=True, help="A Float8LinearConfig of torchao instead of recipe, padding, emulation."
    )

    def __attrs_post_init__(self) -> None:
        if self.config is not None and (self.recipe != RECIPES[0] or self.pad_inner_dim or self.emulate):
            raise ValueError(
                "fp8_torchao.config is set together with recipe, pad_inner_dim or emulate, which it replaces"
                "\nset these in the config, or leave the config out"
            )
        for name in ("only", "skip"):
            try:
                re.compile(getattr(self, name) or "")
            except re.error as error:
                raise ValueError(
                    f"fp8_torchao.{name}: {getattr(self, name)!r} is not a regular expression: {error}\n"
                    "escape it, or fix it"
                ) from None

    @property
    def gathers(self) -> bool:
        """True if weights are gathered in float8, by `all_gather` or by `config`."""
        return self.all_gather or bool(getattr(self.config, "enable_fsdp_float8_all_gather", False))

"""The card: accel-core reads it before it imports anything else of this package."""

from __future__ import annotations

from importlib.util import find_spec

from accel_core import Card

__all__ = ["FP8"]


def _probe() -> str | None:
    return None if find_spec("torchao") else "torchao is not installed (pip install torchao)"


FP8 = Card(
    name="fp8-torchao",
    slot="precision",
    summary="Linear layers multiply float8 matrices by torchao, under autocast to bfloat16.",
    api_version="1.0",
    priority=100,
    also=("fp8",),
    needs={"bf16", "fp8"},
    probe=_probe,
    config="accel_torchao.config:Float8Config",
    implementation="accel_torchao.precision:Float8",
)

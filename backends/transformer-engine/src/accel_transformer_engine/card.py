"""The card: accel-core reads it before it imports anything else of this package."""

from __future__ import annotations

from importlib.util import find_spec

from accel_core import Card

__all__ = ["FP8"]


def _probe() -> str | None:
    if find_spec("transformer_engine"):
        return None
    if find_spec("habana_frameworks"):
        return (
            "Gaudi's Transformer Engine is not supported: the attributes with its scales are not documented,"
            " so no checkpoint could hold them; set mixed_precision: bf16"
        )
    return "transformer-engine is not installed (pip install 'transformer-engine[pytorch]')"


FP8 = Card(
    name="fp8-te",
    slot="precision",
    summary="Layers of Transformer Engine multiply float8 matrices, under autocast to bfloat16.",
    api_version="1.0",
    priority=90,
    also=("fp8",),
    needs={"bf16", "fp8"},
    probe=_probe,
    config="accel_transformer_engine.config:TransformerEngineConfig",
    implementation="accel_transformer_engine.precision:TransformerEngine",
)

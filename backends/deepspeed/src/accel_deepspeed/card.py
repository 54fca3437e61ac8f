"""The card: accel-core reads it before it imports anything else of this package."""

from __future__ import annotations

from importlib.util import find_spec

from accel_core import Card, install_hint

__all__ = ["DEEPSPEED"]


def probe() -> str | None:
    """Reason why DeepSpeed cannot be used; it is not imported."""
    if find_spec("deepspeed") is None:
        return f"DeepSpeed is not installed; {install_hint('backends/deepspeed[runtime]')}"
    return None


DEEPSPEED = Card(
    name="deepspeed",
    slot="strategy",
    summary="DeepSpeed's engine: ZeRO shards optimizer state, gradients and weights, or offloads them.",
    api_version="1.0",
    distributed_type="DEEPSPEED",
    needs={"collectives.torch", "process_per_device"},
    probe=probe,
    prepares={
        "accel_deepspeed.placeholders:DummyOptim": "optimizer",
        "accel_deepspeed.placeholders:DummyScheduler": "scheduler",
    },
    dimensions={
        "sp": "Sequence parallelism (Ulysses): ranks that share each sequence and exchange attention heads."
    },
    config="accel_deepspeed.config:DeepSpeedPlugin",
    implementation="accel_deepspeed.strategy:make",
)

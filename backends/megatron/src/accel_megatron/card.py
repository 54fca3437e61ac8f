"""What accel-core reads of this package before anything else of it is imported."""

from __future__ import annotations

from importlib.util import find_spec

from accel_core import Card

__all__ = ["MEGATRON"]


def probe() -> str | None:
    """Whether megatron-core is installed; it is not imported."""
    try:
        found = find_spec("megatron.core")
    except ModuleNotFoundError:
        found = None
    if found is None:
        return "megatron-core is not installed: pip install accel-megatron[runtime]"
    return None


MEGATRON = Card(
    name="megatron",
    slot="strategy",
    summary="Megatron-core's model code, schedules and optimizer: layers, stages and experts over ranks.",
    api_version="1.0",
    distributed_type="MEGATRON_LM",
    needs={"collectives.torch", "process_per_device"},
    probe=probe,
    config="accel_megatron.config:MegatronLMPlugin",
    implementation="accel_megatron.strategy:Megatron",
)

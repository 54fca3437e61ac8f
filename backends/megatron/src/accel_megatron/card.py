"""The card: accel-core reads it before it imports anything else of this package."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from accel_core import Card, install_hint

__all__ = ["MEGATRON"]


def probe() -> str | None:
    """Reason why megatron-core cannot be used; nothing of it is imported."""
    found = find_spec("megatron")
    folders = () if found is None else found.submodule_search_locations or ()
    if not any(Path(folder, "core", "__init__.py").is_file() for folder in folders):
        return f"megatron-core is not installed; {install_hint('backends/megatron[runtime]')}"
    return None


MEGATRON = Card(
    name="megatron",
    slot="strategy",
    summary="Megatron-core's model code, schedules and optimizer: layers, stages and experts over ranks.",
    api_version="1.0",
    distributed_type="MEGATRON_LM",
    needs={"collectives.torch", "process_per_device"},
    probe=probe,
    prepares={"accel_megatron.placeholders:MegatronLMDummyScheduler": "scheduler"},
    launch_environment="accel_megatron.launching:launch_environment",
    dimensions={
        "tp": "Tensor parallelism: ranks that a layer is split over.",
        "pp": "Pipeline parallelism: stages that the layers are spread over.",
        "ep": "Expert parallelism: ranks of other data that share experts; not a factor of the world.",
        "dp_replicate": "Replicated data parallelism: copies of the model; unset: all ranks that are left.",
    },
    config="accel_megatron.config:MegatronLMPlugin",
    implementation="accel_megatron.strategy:Megatron",
)

"""The card: accel-core reads it before it imports anything else of this package."""

from __future__ import annotations

from accel_core import Card

__all__ = ["SAGEMAKER"]

SAGEMAKER = Card(
    name="sagemaker",
    slot="launcher",
    summary="Hosts of a SageMaker training job, and jobs handed over by the SageMaker SDK.",
    api_version="1.0",
    priority=80,
    offers={"worker_output"},
    config="accel_sagemaker.config:SageMakerConfig",
    implementation="accel_sagemaker.launcher:SageMakerLauncher",
)

"""The card: accel-core reads it before it imports anything else of this package."""

from __future__ import annotations

from accel_core import Card

__all__ = ["KUBERNETES"]

KUBERNETES = Card(
    name="kubernetes",
    slot="launcher",
    summary="Pods of a Kubernetes job, and jobs handed over by kubectl.",
    api_version="1.0",
    priority=90,  # a scheduler that runs inside of pods has started the ranks, if there is one
    offers={"worker_output"},
    config="accel_kubernetes.config:KubernetesConfig",
    implementation="accel_kubernetes.launcher:KubernetesLauncher",
)

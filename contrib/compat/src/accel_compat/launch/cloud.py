"""Jobs of Accelerate's files for Amazon SageMaker, which accel-sagemaker sends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from accel_compat.configs.enums import ComputeEnvironment, SageMakerDistributedType
from accel_compat.settings import find_setting
from accel_core import ConfigError

VERSIONS: Final = ("transformers_version", "pytorch_version", "py_version")
KEYS: Final = {"aws_access_key_id": "AWS_ACCESS_KEY_ID", "aws_secret_access_key": "AWS_SECRET_ACCESS_KEY"}


def is_cloud(settings: Mapping[str, Any]) -> bool:
    """Return True if the file asks for a job in the cloud.

    Raises:
        ConfigError: it asks for a place that is none.
    """
    place = settings.get("compute_environment", ComputeEnvironment.LOCAL_MACHINE.value)
    places = [each.value for each in ComputeEnvironment]
    if place not in places:
        raise ConfigError(
            f"compute_environment {place} is not one of {', '.join(places)}\nchoose one of these"
        )
    return bool(place == ComputeEnvironment.AMAZON_SAGEMAKER.value)


def kind_of(word: str) -> str:
    """Return the kind of a job in the cloud, as a word of SageMakerDistributedType.

    Raises:
        ConfigError: it is none, or is not served.
    """
    served = [SageMakerDistributedType.NO.value, SageMakerDistributedType.DATA_PARALLEL.value]
    if word not in served:
        raise ConfigError(
            f"distributed_type {word} of a job of SageMaker is not one of {', '.join(served)}\n"
            "choose DATA_PARALLEL; a strategy that divides the model is chosen in the script"
        )
    return word


def options(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the path and value of each option of accel-core for a job in the cloud."""
    found: dict[str, Any] = {"launch.launcher": "sagemaker", "launch.nodes": settings.get("num_machines", 1)}
    if settings["distributed_type"] == SageMakerDistributedType.NO.value:
        found["launch.processes_per_node"] = 1  # DATA_PARALLEL: one per device
    for name, value in settings.items():
        setting = find_setting(name)
        is_left_out = name in VERSIONS and "image_uri" in settings  # as in Accelerate, the image wins
        if setting is not None and setting.section == "sagemaker" and not is_left_out:
            found[setting.path] = value
    return found


def credentials(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables of an AWS account whose key was given."""
    return {variable: str(settings[name]) for name, variable in KEYS.items() if name in settings}

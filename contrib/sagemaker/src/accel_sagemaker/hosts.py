"""The hosts of the training job around this process, read from its variables.

SM_HOSTS and SM_CURRENT_HOST are set by the SDK's own script in the container
(sagemaker/train/container_drivers/scripts/environment.py), TRAINING_JOB_NAME by SageMaker.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from attrs import frozen

from accel_core import LaunchError

__all__ = ["Hosts"]


@frozen(kw_only=True)
class Hosts:
    """A host's place among those of its job."""

    job: str
    names: tuple[str, ...]
    rank: int

    @classmethod
    def around(cls, variables: Mapping[str, str]) -> Hosts | None:
        """Return the hosts of the job; None outside of one.

        Raises:
            LaunchError: the variables do not agree.
        """
        if "SM_HOSTS" not in variables or "SM_CURRENT_HOST" not in variables:
            return None
        listed, here, job = (
            variables.get(name, "") for name in ("SM_HOSTS", "SM_CURRENT_HOST", "TRAINING_JOB_NAME")
        )
        try:
            names = sorted(json.loads(listed))
        except (ValueError, TypeError):
            names = []
        if here not in names or not job:
            raise LaunchError(
                f"SM_HOSTS is {listed!r}, SM_CURRENT_HOST {here!r} and TRAINING_JOB_NAME {job!r}, which"
                " tell no place in a job of SageMaker\n"
                "start this as SageMaker's SDK does; or, if no job is around it, name --launcher torchrun"
            )
        return cls(job=job, names=tuple(names), rank=names.index(here))

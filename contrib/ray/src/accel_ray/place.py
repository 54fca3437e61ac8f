"""The place of this process: on a node of ours, in a job of Ray, or outside."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from attrs import asdict, frozen

__all__ = ["PLACE", "Place", "job_around"]

PLACE: Final = "ACCEL_RAY_PLACE"
"""Variable of an `accel launch` that an actor has started."""
JOB: Final = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Variable that Ray's job server sets for the command of a job."""


@frozen(kw_only=True)
class Place:
    """One node's place among those of a job."""

    job: str
    """Name of this attempt of the job."""
    nodes: int
    node: int
    address: str
    """Address of node 0."""
    processes: int
    """Processes of each node."""

    @classmethod
    def around(cls, variables: Mapping[str, str]) -> Place | None:
        """Return the place that an actor has given to this process, if one has."""
        text = variables.get(PLACE)
        return cls(**json.loads(text)) if text else None

    def told(self) -> str:
        """Return the text of the variable."""
        return json.dumps(asdict(self))


def job_around(variables: Mapping[str, str]) -> dict[str, Any] | None:
    """Return what Ray's job server tells the command of its job; None outside of one."""
    text = variables.get(JOB)
    told: dict[str, Any] | None = json.loads(text) if text else None
    return told

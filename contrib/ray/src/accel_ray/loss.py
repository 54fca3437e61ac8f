"""Losses before Ray tells them: of nodes, and of the head of the cluster."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from typing import Any, Final

import ray
from attrs import define, field

from accel_core import LaunchError

__all__ = ["POLL_SECONDS", "VERDICT_SECONDS", "Head", "HeadLost", "silent"]

POLL_SECONDS: Final = 3
"""Time between two looks at the head."""
ANSWER_SECONDS: Final = 10
VERDICT_SECONDS: Final = 120
"""Time in which Ray says that a silent node is lost, by default a minute."""
PATIENCE: Final = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""Variable of Ray: the seconds after which its processes end without the head."""
SHARE: Final = 0.4
"""Part of them that passes before the job ends."""
ENDING_SHARE: Final = 0.3
"""Part of them in which its commands end."""


def silent(actors: Mapping[int, Any]) -> list[int]:
    """Return the nodes whose actors do not answer."""
    if not actors:
        return []
    calls = {actor.address.remote(): node for node, actor in actors.items()}
    answered, rest = ray.wait([*calls], num_returns=len(calls), timeout=ANSWER_SECONDS)
    for call in answered:
        try:
            ray.get(call)
        except ray.exceptions.RayError:
            rest.append(call)
    return sorted(calls[call] for call in rest)


class HeadLost(LaunchError):  # noqa: N818  as NodeLost
    """The head of the cluster is gone, so that Ray cannot be asked for anything."""


@define
class Head:
    """The head of the cluster.

    Its loss ends this process by Ray's own abort, without a reason.
    """

    address: str
    _answered: float = field(factory=time.monotonic)

    @classmethod
    def of_cluster(cls) -> Head:
        """Return that of the cluster that is connected."""
        return cls(ray.get_runtime_context().gcs_address)

    @property
    def ending_seconds(self) -> float:
        """Time for the commands to end, once it is lost."""
        return ENDING_SHARE * _patience()

    def require(self) -> None:
        """Raise HeadLost once it was silent for a part of the time that Ray gives it."""
        host, _, port = self.address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), ANSWER_SECONDS).close()
        except OSError as error:
            seconds = time.monotonic() - self._answered
            if seconds > SHARE * _patience():
                raise HeadLost(
                    f"the cluster's head, {self.address}, has been silent for {seconds:.0f} s: {error}\n"
                    "a cluster of Ray ends with its head; start it again, and the job, whose script resumes"
                    " from its last checkpoint"
                ) from error
        else:
            self._answered = time.monotonic()


def _patience() -> float:
    return float(os.environ.get(PATIENCE, "60"))

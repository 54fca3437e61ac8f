"""The pod around this process, read from its variables.

PET_NNODES, PET_NODE_RANK and PET_MASTER_ADDR are torchrun's, and set by Kubeflow's trainer
(pkg/runtime/framework/plugins/torch/torch.go) and by the manifest of a JobSet here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from attrs import frozen

from accel_core import LaunchError

__all__ = ["ADDRESS", "NODES", "PROCESSES", "RANK", "Pod"]

NODES: Final = "PET_NNODES"
RANK: Final = "PET_NODE_RANK"
ADDRESS: Final = "PET_MASTER_ADDR"
PROCESSES: Final = "PET_NPROC_PER_NODE"


@frozen(kw_only=True)
class Pod:
    """A pod's place among the pods of its job."""

    rank: int
    nodes: int
    address: str
    """Name of pod 0."""
    processes: int | None
    """Kubeflow's number of processes: that asked for, or a pod's CPUs.

    None where the pod has GPUs, which torchrun counts.
    """

    @classmethod
    def around(cls, variables: Mapping[str, str]) -> Pod | None:
        """Return the pod around this process; None outside of a job of pods.

        Raises:
            LaunchError: some variables of such a pod are there, and others are not, or are not numbers.
        """
        if "KUBERNETES_SERVICE_HOST" not in variables or NODES not in variables:
            return None
        wrong = next((name for name in (NODES, RANK) if not variables.get(name, "").isdecimal()), None)
        wrong = wrong or (ADDRESS if not variables.get(ADDRESS) else None)
        if wrong:
            found = f"is {variables[wrong]!r}" if wrong in variables else "is not set"
            raise LaunchError(
                f"this pod has {NODES} as a pod of a JobSet or a TrainJob, and {wrong} {found}\n"
                f"set {NODES} and {RANK} to numbers, and {ADDRESS} to the name of pod 0; or, if this pod is"
                " alone, name --launcher torchrun"
            )
        processes = variables.get(PROCESSES, "")
        return cls(
            rank=int(variables[RANK]),
            nodes=int(variables[NODES]),
            address=variables[ADDRESS],
            processes=int(processes) if processes.isdecimal() else None,
        )

"""Options of `accel submit --launcher kubernetes`."""

from __future__ import annotations

import posixpath
import shlex
from typing import Final

from attrs import frozen

from accel_core import option

__all__ = ["SHARED_MEMORY", "KubernetesConfig"]

OURS: Final = ("-f", "--filename", "-o", "--output", "--dry-run")
"""Options of kubectl that the launcher sets, or that would send nothing."""
SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108  the pod's
"""Path of a volume that each pod has."""


@frozen(kw_only=True)
class KubernetesConfig:
    """Jobs that are handed to Kubernetes. Section `kubernetes`."""

    kind: str = option("jobset", choices=("jobset", "trainjob"), help="Resource that is made of the job.")
    image: str | None = option(
        None, help="Container image with Python, accel-core, and the script at the path that is given here."
    )
    resources: str = option("", help="Resources of each pod: nvidia.com/gpu=8,memory=64Gi.")
    volumes: str = option(
        "", help="Persistent volume claims, and where they are mounted: checkpoints:/checkpoints,data:/data."
    )
    pod: str | None = option(
        None, help="YAML file with more of the pods' spec, such as nodeSelector and tolerations."
    )
    max_restarts: int = option(
        0,
        minimum=0,
        help="How often pods start again after a failure: all of them, or one of an elastic job.",
    )
    runtime: str | None = option(
        None, help="ClusterTrainingRuntime of a TrainJob; default: torch-distributed."
    )
    options: str = option("", help="Options of each kubectl command: --context=prod --namespace=team.")

    def __attrs_post_init__(self) -> None:
        words = shlex.split(self.options)
        if words and not words[0].startswith("-"):
            raise ValueError(f"options {self.options!r} are not options of kubectl; write --namespace=team")
        for word in words:
            if word.partition("=")[0] in OURS:
                raise ValueError(f"options have {word}, which accel submit sets; leave it out")
        self.claims()
        self.limits()
        if self.kind == "trainjob" and self.max_restarts:
            raise ValueError(
                "max_restarts is of jobset; the runtime of a TrainJob says how often it restarts"
            )
        if self.kind == "jobset" and self.runtime is not None:
            raise ValueError("runtime is of trainjob; choose kind: trainjob, or leave it out")

    def claims(self) -> dict[str, str]:
        """Return the mount path of each claim.

        Raises:
            ValueError: `volumes` are not pairs of a claim and an absolute path of its own.
        """
        pairs = _pairs(self.volumes, ":", "volumes", "write checkpoints:/checkpoints")
        if any(not path.startswith("/") for path in pairs.values()):
            raise ValueError(f"volumes {self.volumes!r} have a path that is not absolute; begin it with /")
        places = [posixpath.normpath(path) for path in (SHARED_MEMORY, *pairs.values())]
        twice = next((path for path in places if places.count(path) > 1), None)
        if twice is not None:
            raise ValueError(f"volumes {self.volumes!r} mount two at {twice}; name another path")
        return pairs

    def limits(self) -> dict[str, str]:
        """Return the quantity of each resource.

        Raises:
            ValueError: `resources` are not pairs of a name and a quantity.
        """
        return _pairs(self.resources, "=", "resources", "write nvidia.com/gpu=8,memory=64Gi")


def _pairs(text: str, sign: str, name: str, remedy: str) -> dict[str, str]:
    found = [[part.strip() for part in entry.split(sign)] for entry in text.split(",") if entry.strip()]
    keys = [pair[0] for pair in found]
    if any(len(pair) != 2 or not all(pair) for pair in found) or len(set(keys)) < len(keys):
        raise ValueError(f"{name} {text!r} are not pairs with {sign!r}, each once; {remedy}")
    return dict(found)

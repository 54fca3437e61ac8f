"""The manifest of a job: a JobSet, or a TrainJob of Kubeflow's trainer.

Sources: api/jobset/v1alpha2/jobset_types.go of kubernetes-sigs/jobset; pkg/apis/trainer/v1alpha1 of
kubeflow/trainer. Both make indexed jobs, and a headless service by which pods know each other's names.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any, Final

import yaml

from accel_core import Job, LaunchError
from accel_kubernetes.config import SHARED_MEMORY, KubernetesConfig
from accel_kubernetes.pod import ADDRESS, NODES, RANK

__all__ = ["manifest"]

Document = dict[str, Any]

GROUP: Final = "node"
"""Name of the pods' job and of their container, as in Kubeflow's runtimes."""
INDEX: Final = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
STAYS_HERE: Final = ("ACCEL_CONFIG", "ACCEL_LAUNCH_CONFIG", "ACCEL_LAUNCH_VARIABLES")
"""Variables with paths of this machine, and what a launcher set here."""
FLAGS: Final = 4
"""Place of the first flag in `Job.command`, which is --config if there is a file."""
ENDING_SECONDS: Final = 60
"""More than the 30 s that `accel launch` gives its workers to end."""
NAME_LETTERS: Final = 30
"""Pods' names add up to 33 to it, and may have 63."""
OF_OPTIONS: Final = {
    "containers": "kubernetes.image, resources and volumes",
    "volumes": "kubernetes.volumes",
    "restartPolicy": "kubernetes.max_restarts",
}
"""Keys of a pod's spec that options set."""


def manifest(job: Job, config: KubernetesConfig) -> str:
    """Return the YAML that kubectl is given.

    Raises:
        LaunchError: an option that the job needs is not set, one cannot be kept, or the pods' file is none.
    """
    if job.rendezvous is not None:
        raise LaunchError(
            f"launch.rendezvous {job.rendezvous} was asked for, and every pod would be node 0 there\n"
            "leave it out: the pods of a job find each other"
        )
    made = _jobset(job, config) if config.kind == "jobset" else _trainjob(job, config)
    text: str = yaml.dump(made, Dumper=_Dumper, sort_keys=False, width=1000)
    return text


class _Dumper(yaml.SafeDumper):
    """Quotes the words that kubectl would read as a number or a truth value."""


def _as_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    # Its YAML has other plain numbers than PyYAML, such as 1e-4 and 0o17, and y and n.
    style = "'" if len(text) == 1 or text[:1] in "0123456789.+-" else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _as_text)


def _jobset(job: Job, config: KubernetesConfig) -> Document:
    if config.image is None:
        raise LaunchError(
            "kubernetes.image is not set\n"
            "name an image with Python, accel-core and the script: --kubernetes.image registry/team/train:1"
        )
    if job.min_nodes is not None and not config.max_restarts:
        raise LaunchError(
            f"launch.min_nodes {job.min_nodes} lets the job go on without a pod, and"
            " kubernetes.max_restarts 0 ends it with the first that fails\n"
            "set --kubernetes.max-restarts 3, or leave launch.min_nodes out"
        )
    name = _name(job)
    place: list[Document] = [
        {"name": NODES, "value": str(job.nodes)},
        {"name": RANK, "valueFrom": {"fieldRef": {"fieldPath": INDEX}}},
        {"name": ADDRESS, "value": f"{name}-{GROUP}-0-0.{name}"},
    ]
    pods = {
        "completionMode": "Indexed",
        "parallelism": job.nodes,
        "completions": job.nodes,
        # Of an elastic job a pod starts again alone; else all do, by the failure policy.
        "backoffLimit": config.max_restarts if job.min_nodes else 0,
        "template": {"spec": _pod(job, config, place)},
    }
    if job.min_nodes:  # a pod that comes back once the job is done has none to join
        pods["successPolicy"] = {"rules": [{"succeededIndexes": "0"}]}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {
            # Pods that start again shall not meet those before them, which have the same names.
            "failurePolicy": {"maxRestarts": config.max_restarts, "restartStrategy": "BlockingRecreate"},
            "replicatedJobs": [{"name": GROUP, "replicas": 1, "template": {"spec": pods}}],
        },
    }


def _pod(job: Job, config: KubernetesConfig, place: list[Document]) -> Document:
    container: Document = {
        "name": GROUP,
        "image": config.image,
        "command": _command(job),
        "env": [*place, *_environment()],
        # The 64 MB that containers have are too few for loaders' workers and for NCCL.
        "volumeMounts": [{"name": "shm", "mountPath": SHARED_MEMORY}, *_mounts(config)],
    }
    if limits := config.limits():
        container["resources"] = {"limits": limits}
    return {
        "terminationGracePeriodSeconds": ENDING_SECONDS,
        # Process 1 of a container is deaf to signals before it asks for them, and inherits orphans.
        "shareProcessNamespace": True,
        **_more(config),
        "restartPolicy": "Never",
        "containers": [container],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}, *_volumes(config)],
    }


def _trainjob(job: Job, config: KubernetesConfig) -> Document:
    trainer: Document = {"numNodes": job.nodes, "command": _command(job)}
    if config.image is not None:
        trainer["image"] = config.image
    if environment := _environment():
        trainer["env"] = environment
    if job.processes_per_node:
        trainer["numProcPerNode"] = job.processes_per_node
    if limits := config.limits():
        trainer["resourcesPerNode"] = {"limits": limits}
    spec: Document = {"runtimeRef": {"name": config.runtime or "torch-distributed"}, "trainer": trainer}
    pod = _more(config)
    if volumes := _volumes(config):
        pod |= {"volumes": volumes, "containers": [{"name": GROUP, "volumeMounts": _mounts(config)}]}
    if pod:
        pods = {"name": GROUP, "template": {"spec": {"template": {"spec": pod}}}}
        patch = {"template": {"spec": {"replicatedJobs": [pods]}}}
        spec["runtimePatches"] = [{"manager": "accel-core/accel-kubernetes", "trainingRuntimeSpec": patch}]
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": _name(job)},
        "spec": spec,
    }


def _name(job: Job) -> str:
    """Return a new name, after the script or the module."""
    words = [word for word in job.command[FLAGS:] if not word.startswith("-")]
    stem = Path(words[0]).stem if words else "accel"
    kept = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in stem.lower())
    kept = kept[:NAME_LETTERS].strip("-")
    return f"{kept if kept[:1].isalpha() else 'accel'}-{secrets.token_hex(3)}"


def _command(job: Job) -> list[str]:
    """Return `accel launch` as the image runs it, in the image's own folder."""
    words = ["python3", *job.command[1:]]
    if len(words) > FLAGS and words[FLAGS].startswith("--config="):
        path = Path(words[FLAGS].removeprefix("--config="))
        if path.is_relative_to(Path.cwd()):
            words[FLAGS] = f"--config={path.relative_to(Path.cwd())}"
    return [_plain(word) for word in words]


def _environment() -> list[Document]:
    """Return the user's variables for accel-core."""
    inherited = {"ACCEL_RUN_ID"} if "ACCEL_LAUNCH_CONFIG" in os.environ else set()
    names = sorted(name for name in os.environ if name.startswith("ACCEL_"))
    kept = [name for name in names if name not in {*STAYS_HERE, *inherited}]
    return [{"name": name, "value": _plain(os.environ[name])} for name in kept]


def _plain(text: str) -> str:
    """Return the text as Kubernetes writes it.

    Of `$$` it makes one `$`, and it replaces `$(NAME)`.
    """
    return text.replace("$", "$$")


def _volumes(config: KubernetesConfig) -> list[Document]:
    """Name volumes by number: a claim's name may have dots, which a volume's may not."""
    claims = [{"claimName": claim} for claim in config.claims()]
    return [
        {"name": f"claim-{number}", "persistentVolumeClaim": claim} for number, claim in enumerate(claims)
    ]


def _mounts(config: KubernetesConfig) -> list[Document]:
    paths = config.claims().values()
    return [{"name": f"claim-{number}", "mountPath": path} for number, path in enumerate(paths)]


def _more(config: KubernetesConfig) -> Document:
    """Return what the user's file has of the pods' spec."""
    if config.pod is None:
        return {}
    remedy = "name a YAML file with keys of a pod's spec, such as nodeSelector"
    try:
        found = yaml.safe_load(Path(config.pod).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise LaunchError(f"kubernetes.pod {config.pod} cannot be read: {error}\n{remedy}") from error
    if not isinstance(found, dict):
        raise LaunchError(f"kubernetes.pod {config.pod} holds no keys and values\n{remedy}")
    for key in OF_OPTIONS.keys() & found.keys():
        raise LaunchError(f"{config.pod} has {key}, which options set\nuse {OF_OPTIONS[key]} instead")
    return found

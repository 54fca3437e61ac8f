"""The arguments of the SDK's classes for a job, as plain values.

Source: ModelTrainer of sagemaker-train (version 3 of the SDK). Version 2's estimators start a script with
hyperparameters; ModelTrainer runs a command, which is `accel launch` on each host.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from attrs import asdict, frozen

from accel_core import Job, LaunchError
from accel_sagemaker.config import SageMakerConfig

__all__ = ["Request", "request"]

Arguments = dict[str, Any]

FLAGS: Final = 4
"""Place of the first flag in `Job.command`, which is --config if there is a file."""


@frozen(kw_only=True)
class Request:
    """Arguments of the SDK's classes and functions, by name."""

    session: Arguments
    """boto3.Session."""
    image: str | Arguments
    """URI, or image_uris.retrieve."""
    source_code: Arguments
    compute: Arguments
    trainer: Arguments
    """ModelTrainer, beside the four above."""
    metrics: list[Arguments]
    """MetricDefinition of each."""
    inputs: list[Arguments]
    """InputData of each."""

    def as_dict(self) -> Arguments:
        """Return the parts that say something."""
        return {name: part for name, part in asdict(self).items() if part}


def request(job: Job, config: SageMakerConfig) -> Request:
    """Return the request for a job.

    Raises:
        LaunchError: an option that the job needs is not set, a file cannot be read, or lies elsewhere.
    """
    for name, example in (("instance_type", "ml.p4d.24xlarge"), ("role", "arn:aws:iam::1234:role/train")):
        if getattr(config, name) is None:
            flag = f"--sagemaker.{name.replace('_', '-')}"
            raise LaunchError(f"sagemaker.{name} is not set\nname it, for example {flag} {example}")
    if job.min_nodes is not None:
        raise LaunchError(
            f"launch.min_nodes {job.min_nodes} was asked for, and SageMaker ends a job that loses a host\n"
            "leave it out, and let the script resume from its last checkpoint"
        )
    if job.rendezvous is not None:
        raise LaunchError(
            f"launch.rendezvous {job.rendezvous} was asked for, and every host would be node 0 there\n"
            "leave it out: the hosts of a job find each other"
        )
    trainer = {"role": config.role, "environment": _environment(), **config.arguments}
    if config.job_name is not None:
        trainer["base_job_name"] = config.job_name
    return Request(
        session=_named({"profile_name": config.profile, "region_name": config.region}),
        image=_image(config),
        source_code=_source_code(job, config),
        compute={"instance_type": config.instance_type, "instance_count": job.nodes},
        trainer=trainer,
        metrics=[{"name": name, "regex": text} for name, text in _rows(config.metrics_file, "metrics_file")],
        inputs=[
            {"channel_name": name, "data_source": place}
            for name, place in _rows(config.inputs_file, "inputs_file")
        ],
    )


def _image(config: SageMakerConfig) -> str | Arguments:
    if config.image is not None:
        return config.image
    if config.transformers_version is None:
        raise LaunchError(
            "sagemaker.image is not set\n"
            "name an image with --sagemaker.image, or Hugging Face's by transformers_version, pytorch_version"
            " and py_version"
        )
    return {
        "framework": "huggingface",
        "version": config.transformers_version,
        "base_framework_version": f"pytorch{config.pytorch_version}",
        "py_version": config.py_version,
        "instance_type": config.instance_type,
        "image_scope": "training",
    }


def _source_code(job: Job, config: SageMakerConfig) -> Arguments:
    folder = Path(os.path.normpath(Path.cwd() / config.source_dir))
    words, script = list(job.command[FLAGS:]), 0
    while words[script].startswith("--"):
        script += 1
    if words[0].startswith("--config="):
        words[0] = f"--config={_within(folder, words[0].removeprefix('--config='))}"
    if words[script] != "-m":
        words[script] = _within(folder, words[script])
    # The SDK splits `command` at spaces, and quotes `args`.
    found = {"source_dir": str(folder), "command": "python3 -m accel_core launch", "args": words}
    return found | _named({"requirements": config.requirements})


def _within(folder: Path, file: str) -> str:
    """Return the path of a file from the folder that is sent."""
    path = Path(os.path.normpath(Path.cwd() / file))
    if not path.is_relative_to(folder):
        raise LaunchError(
            f"{file} is not in {folder}, the folder that is sent (sagemaker.source_dir)\n"
            "move it there, or name another folder with --sagemaker.source-dir"
        )
    return str(path.relative_to(folder))


def _environment() -> dict[str, str]:
    """Return the user's variables for accel-core.

    Without paths of this machine, and what a launcher set here.
    """
    stays = {"ACCEL_CONFIG", "ACCEL_LAUNCH_CONFIG", "ACCEL_LAUNCH_VARIABLES"}
    if "ACCEL_LAUNCH_CONFIG" in os.environ:  # a rank hands no run's name on
        stays.add("ACCEL_RUN_ID")
    names = sorted(name for name in os.environ if name.startswith(("ACCEL_", "ACCELERATE_")))
    return {name: os.environ[name] for name in names if name not in stays}


def _rows(file: str | None, option: str) -> list[tuple[str, str]]:
    if file is None:
        return []
    remedy = "name a file with a title line, and two columns with a tab between them"
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()[1:]
    except OSError as error:
        raise LaunchError(f"sagemaker.{option} {file} cannot be read: {error.strerror}\n{remedy}") from error
    found = [(line, *line.split("\t")) for line in lines if line.strip()]
    for line, *columns in found:
        if len(columns) != 2:
            raise LaunchError(f"sagemaker.{option} {file} has a line without two columns: {line!r}\n{remedy}")
    return [(name.strip(), text.strip()) for _, name, text in found]


def _named(arguments: Arguments) -> Arguments:
    return {name: value for name, value in arguments.items() if value is not None}

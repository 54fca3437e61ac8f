"""Options of `accel submit --launcher sagemaker`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from attrs import asdict, frozen

from accel_core import option

__all__ = ["SageMakerConfig"]

VERSIONS: Final = ("transformers_version", "pytorch_version", "py_version")
OURS: Final = {
    "base_job_name": "sagemaker.job_name",
    "compute": "launch.nodes and sagemaker.instance_type",
    "environment": "ACCEL_ variables",
    "input_data_config": "sagemaker.inputs_file",
    "role": "sagemaker.role",
    "sagemaker_session": "sagemaker.region and profile",
    "source_code": "sagemaker.source_dir and requirements",
    "training_image": "sagemaker.image",
}
"""Arguments of ModelTrainer that options set: the option."""


@frozen(kw_only=True)
class SageMakerConfig:
    """Jobs that are handed to Amazon SageMaker. Section `sagemaker`."""

    instance_type: str | None = option(None, help="Type of each instance: ml.p4d.24xlarge.")
    role: str | None = option(None, help="Name or ARN of the IAM role that the job has.")
    image: str | None = option(
        None, help="URI of the container image; unset: Hugging Face's, by the three versions below."
    )
    transformers_version: str | None = option(None, help="Of Hugging Face's image.")
    pytorch_version: str | None = option(None, help="Of Hugging Face's image.")
    py_version: str | None = option(None, help="Of Hugging Face's image: py312.")
    source_dir: str = option(".", help="Folder that is sent with the job; the script is in it.")
    requirements: str | None = option(
        None, help="File in it with requirements to install; accel-core, if the image has none."
    )
    job_name: str | None = option(None, help="Start of the job's name.")
    region: str | None = option(None, help="AWS region; unset: that of the AWS configuration.")
    profile: str | None = option(None, help="Profile of the AWS configuration.")
    inputs_file: str | None = option(
        None, help="TSV file with a title line, and a channel and its S3 URI per line."
    )
    metrics_file: str | None = option(
        None, help="TSV file with a title line, and a metric and its regular expression per line."
    )
    arguments: Mapping[str, Any] = option(
        factory=dict,
        help="More arguments of the SDK's ModelTrainer, such as checkpoint_config and networking.",
    )

    def __attrs_post_init__(self) -> None:
        empty = next((name for name, value in asdict(self).items() if value == ""), None)
        if empty is not None:  # the SDK would take a default of its own, such as another role
            raise ValueError(f"{empty} is empty; name it, or leave it out")
        given = [name for name in VERSIONS if getattr(self, name) is not None]
        if self.image is not None and given:
            raise ValueError(f"image and {given[0]} name two images; leave one out")
        if given and len(given) < len(VERSIONS):
            missing = next(name for name in VERSIONS if name not in given)
            raise ValueError(f"{given[0]} alone names no image; add {missing}, or name an image")
        for name in self.arguments.keys() & OURS.keys():
            raise ValueError(f"arguments have {name}, which {OURS[name]} set; use these")

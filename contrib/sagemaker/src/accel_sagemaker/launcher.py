"""The launcher: finds the hosts of a training job, and has the SDK make one."""

from __future__ import annotations

import os
import shlex
from typing import Any

import yaml

from accel_core import Allocation, Job, LaunchConfig, LaunchError, SubmittedJob, hooks, implements
from accel_sagemaker.config import SageMakerConfig
from accel_sagemaker.hosts import Hosts
from accel_sagemaker.request import Request, request

__all__ = ["SageMakerLauncher"]


class SageMakerLauncher:
    """Launcher `sagemaker`; torchrun below it starts the ranks of a host."""

    below: Any

    def __init__(self, config: SageMakerConfig, run: None) -> None:
        self.config = config

    @implements(hooks.allocation)
    def allocation(self, launch: LaunchConfig) -> Allocation | None:
        """Return the hosts of the job.

        None outside of a job of several hosts, and if the user names the place where nodes meet.
        """
        hosts = Hosts.around(os.environ)
        if hosts is None or launch.rendezvous is not None:
            return None
        count = len(hosts.names)
        if launch.nodes > 1 and launch.nodes != count:
            raise LaunchError(
                f"{launch.nodes} nodes were asked for (launch.nodes), and job {hosts.job} of SageMaker has"
                f" {count} hosts\ngive the job as many instances, or leave launch.nodes out"
            )
        if count == 1:
            return None
        return Allocation(
            job_id=f"sagemaker-{hosts.job}", nodes=count, node_rank=hosts.rank, address=hosts.names[0]
        )

    @implements(hooks.launch)
    def launch(self, job: Job) -> int:
        """Have torchrun start the ranks of this host."""
        if "SM_HOSTS" not in os.environ and self.config != SageMakerConfig():
            raise LaunchError(
                "options of section sagemaker are of jobs that are handed over, and"
                " no job of SageMaker is around this process\n"
                "use `accel submit`; or, to train on this machine, name --launcher torchrun"
            )
        code: int = self.below.launch(job)
        return code

    @implements(hooks.preview)
    def preview(self, job: Job, submits: bool) -> str:
        """Return the arguments of the SDK's classes, as YAML."""
        return yaml.safe_dump(request(job, self.config).as_dict(), sort_keys=False) if submits else ""

    @implements(hooks.submit)
    def submit(self, job: Job) -> SubmittedJob:
        """Have the SDK send the folder and make a training job."""
        asked = request(job, self.config)
        try:
            name = _train(asked)
        except ImportError as error:
            raise LaunchError(
                f"the SageMaker SDK of version 3 is not installed here: {error}\n"
                "pip install sagemaker-train, or see with --dry-run what it would be asked for"
            ) from error
        except LaunchError:
            raise
        except Exception as error:
            raise LaunchError(
                f"SageMaker refused the job: {error}\n"
                "change the options of section sagemaker; `accel submit --dry-run` shows the arguments"
            ) from error
        where = []
        for flag, text in (("--region", self.config.region), ("--profile", self.config.profile)):
            where += [flag, text] if text else []
        named = ["--training-job-name", name, *where]
        logs = ["--log-stream-name-prefix", name, "--follow", *where]
        return SubmittedJob(
            id=name,
            watch=shlex.join(["aws", "sagemaker", "describe-training-job", *named]),
            cancel=shlex.join(["aws", "sagemaker", "stop-training-job", *named]),
            logs=shlex.join(["aws", "logs", "tail", "/aws/sagemaker/TrainingJobs", *logs]),
        )


def _train(asked: Request) -> str:
    """Start the job by the SDK, and return its name."""
    import boto3
    from sagemaker.core import image_uris
    from sagemaker.core.helper.session_helper import Session
    from sagemaker.core.shapes import MetricDefinition
    from sagemaker.core.training.configs import Compute, InputData, SourceCode
    from sagemaker.train.model_trainer import ModelTrainer

    session = Session(boto_session=boto3.Session(**asked.session))
    image = asked.image
    if not isinstance(image, str):
        image = image_uris.retrieve(region=session.boto_region_name, **image)
    trainer = ModelTrainer(
        sagemaker_session=session,
        training_image=image,
        source_code=SourceCode(**asked.source_code),
        compute=Compute(**asked.compute),
        **asked.trainer,
    )
    if asked.metrics:
        trainer = trainer.with_metric_definitions([MetricDefinition(**each) for each in asked.metrics])
    trainer.train(
        input_data_config=[InputData(**each) for each in asked.inputs] or None, wait=False, logs=False
    )
    sent = getattr(trainer, "_latest_training_job", None)  # the SDK tells the name nowhere else
    if sent is None:
        raise LaunchError(
            "SageMaker has the job, and this version of the SDK does not tell its name\n"
            "find it by `aws sagemaker list-training-jobs`; submitting again would start another"
        )
    name: str = sent.training_job_name
    return name

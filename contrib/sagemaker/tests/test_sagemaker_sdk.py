"""What the SDK is asked for, against its own source; hosts as its own script tells them."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from sdk_source import NEEDED, arguments_of, fields_of, file_of, strict

from accel_core import Job, LaunchConfig, LaunchError
from accel_sagemaker.config import OURS, SageMakerConfig
from accel_sagemaker.launcher import SageMakerLauncher
from accel_sagemaker.request import request

pytestmark = NEEDED

JOB = Job(
    argv=(), command=("/here/python", "-m", "accel_core", "launch", "train.py", "--note", "a  b"), nodes=2
)
TRAIN, CONFIGS = "sagemaker.train.model_trainer", "sagemaker.core.training.configs"
SHAPES, SESSION = "sagemaker.core.shapes.shapes", "sagemaker.core.helper.session_helper"
TELLS = "import json, os; print(json.dumps(dict(os.environ)))"
IMAGES, DRIVER = "sagemaker.core.image_uris", "sagemaker.train.container_drivers.scripts.environment"


@pytest.fixture
def whole(tmp_path, monkeypatch) -> SageMakerConfig:
    """A config that says everything there is to say."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "inputs.tsv").write_text("channel\tplace\ntrain\ts3://bucket/train\n")
    (tmp_path / "metrics.tsv").write_text("metric\tregex\nloss\tloss=(.*)\n")
    return SageMakerConfig(
        instance_type="ml.p4d.24xlarge",
        role="train",
        transformers_version="4.56.2",
        pytorch_version="2.8.0",
        py_version="py312",
        requirements="requirements.txt",
        job_name="ours",
        region="eu-west-1",
        profile="team",
        inputs_file="inputs.tsv",
        metrics_file="metrics.tsv",
        arguments={"checkpoint_config": {"s3_uri": "s3://bucket/run"}},
    )


@pytest.fixture
def sdk(monkeypatch) -> dict[str, list[dict[str, Any]]]:
    """Put a stand-in for the SDK in its place, that takes what the SDK's source says, and notes it."""
    made: dict[str, list[dict[str, Any]]] = {name: [] for name in ("trainer", "session", "train", "parts")}
    trainings = arguments_of(TRAIN, "ModelTrainer.train")

    def train(self: Any, **given: Any) -> None:
        assert given.keys() <= trainings
        made["train"].append(given)
        self._latest_training_job = SimpleNamespace(training_job_name="ours-2026")

    def with_metric_definitions(self: Any, metric_definitions: list[Any]) -> Any:
        made["parts"].append({"metrics": len(metric_definitions)})
        return self

    def retrieve(**given: Any) -> str:
        assert given.keys() <= arguments_of(IMAGES, "retrieve")
        made["parts"].append(given)
        return "registry/huggingface"

    trainer = strict(
        fields_of(TRAIN, "ModelTrainer"),
        made["trainer"],
        train=train,
        with_metric_definitions=with_metric_definitions,
    )
    session = strict(arguments_of(SESSION, "Session.__init__"), made["session"], boto_region_name="eu-west-1")
    parts = {
        name: strict(fields_of(CONFIGS, name), made["parts"])
        for name in ("Compute", "InputData", "SourceCode")
    }
    modules = {
        "boto3": {"Session": lambda **given: given},
        "sagemaker": {},
        "sagemaker.core": {"image_uris": SimpleNamespace(retrieve=retrieve)},
        "sagemaker.core.helper": {},
        SESSION: {"Session": session},
        "sagemaker.core.shapes": {
            "MetricDefinition": strict(fields_of(SHAPES, "MetricDefinition"), made["parts"])
        },
        "sagemaker.core.training": {},
        CONFIGS: parts,
        "sagemaker.train": {},
        TRAIN: {"ModelTrainer": trainer},
    }
    for name, members in modules.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    return made


def test_a_job_is_sent_by_arguments_that_the_sdk_has(sdk, whole):
    job = SageMakerLauncher(whole, None).submit(JOB)

    (trainer,) = sdk["trainer"]
    assert trainer["training_image"] == "registry/huggingface"
    assert trainer["checkpoint_config"] == {"s3_uri": "s3://bucket/run"}
    assert vars(trainer["compute"]) == {"instance_type": "ml.p4d.24xlarge", "instance_count": 2}
    assert vars(trainer["source_code"])["command"] == "python3 -m accel_core launch"
    assert vars(trainer["source_code"])["args"] == ["train.py", "--note", "a  b"]
    (train,) = sdk["train"]
    assert (train["wait"], len(train["input_data_config"])) == (False, 1)
    assert sdk["session"] == [{"boto_session": {"profile_name": "team", "region_name": "eu-west-1"}}]
    assert {"metrics": 1} in sdk["parts"]
    assert job.id == "ours-2026"
    where = "--training-job-name ours-2026 --region eu-west-1 --profile team"
    assert job.cancel == f"aws sagemaker stop-training-job {where}"


def test_a_job_that_was_sent_is_not_called_refused_where_its_name_is_not_told(sdk, whole):
    trainer = sys.modules[TRAIN].ModelTrainer
    trainer.train = lambda self, **given: None

    with pytest.raises(LaunchError, match=r"SageMaker has the job, .*\n.*submitting again"):
        SageMakerLauncher(whole, None).submit(JOB)


def test_the_stand_in_takes_no_argument_that_the_sdk_has_not(sdk, whole):
    from attrs import evolve

    with pytest.raises(LaunchError, match="checkpoints"):
        SageMakerLauncher(evolve(whole, arguments={"checkpoints": 1}), None).submit(JOB)
    assert sdk["train"] == []


def test_arguments_that_options_set_are_the_sdks():
    assert OURS.keys() <= fields_of(TRAIN, "ModelTrainer")


def test_the_images_arguments_are_those_of_the_sdk(whole):
    assert request(JOB, whole).image.keys() <= arguments_of(IMAGES, "retrieve")


@pytest.mark.parametrize("host", [1, 10])
def test_hosts_are_found_as_the_sdks_own_script_tells_them(host, tmp_path, monkeypatch, run_command):
    hosts = [f"algo-{number}" for number in (1, 2, 10)]
    told = {"current_host": f"algo-{host}", "current_instance_type": "ml.g5", "hosts": hosts}
    call = (
        "import importlib.util, sys\n"
        "spec = importlib.util.spec_from_file_location('environment', sys.argv[1])\n"
        "module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module)\n"
        f"module.set_env({ {**told, 'network_interface_name': 'eth0'} }, {{}}, {{}}, sys.argv[2])\n"
    )
    monkeypatch.setenv("TRAINING_JOB_NAME", "ours-2026")
    run_command(
        [sys.executable, "-c", call, file_of(DRIVER), tmp_path / "env"], check=True, capture_output=True
    )
    words = [
        "bash",
        "-c",
        f"source {tmp_path}/env; exec {sys.executable} -c '{TELLS}'",
    ]
    variables = json.loads(run_command(words, check=True, capture_output=True, text=True).stdout)
    for name, text in variables.items():
        monkeypatch.setenv(name, text)

    found = SageMakerLauncher(SageMakerConfig(), None).allocation(LaunchConfig())

    rank = {1: 0, 10: 1}[host]  # the SDK sorts them as words
    assert (found.nodes, found.node_rank, found.address) == (3, rank, variables["SM_MASTER_ADDR"])
    assert found.node_rank == int(variables["SM_CURRENT_HOST_RANK"])
    assert found.job_id == "sagemaker-ours-2026"

"""Config files for Amazon SageMaker: their keys are options of accel-sagemaker."""

from __future__ import annotations

import json
import os

import pytest

from accel_compat.launch import workers
from accel_compat.launch.convert import convert
from accel_compat.launch.request import parse, read_file
from accel_core import ConfigError

CLOUD = """
compute_environment: AMAZON_SAGEMAKER
distributed_type: {kind}
ec2_instance_type: ml.p4d.24xlarge
iam_role_name: train
profile: team
region: eu-west-1
num_machines: 2
base_job_name: ours
pytorch_version: 2.8.0
transformers_version: 4.56.2
py_version: py312
sagemaker_inputs_file: inputs.tsv
sagemaker_metrics_file: metrics.tsv
mixed_precision: bf16
use_cpu: false
debug: false
"""
OPTIONS = {
    "instance_type": "ml.p4d.24xlarge",
    "role": "train",
    "profile": "team",
    "region": "eu-west-1",
    "job_name": "ours",
    "inputs_file": "inputs.tsv",
    "metrics_file": "metrics.tsv",
}
VERSIONS = {"pytorch_version": "2.8.0", "transformers_version": "4.56.2", "py_version": "py312"}


@pytest.fixture
def file(tmp_path):
    def write(kind: str = "DATA_PARALLEL", more: str = "") -> str:
        (tmp_path / "cloud.yaml").write_text(CLOUD.format(kind=kind) + more)
        return str(tmp_path / "cloud.yaml")

    return write


def test_the_keys_of_a_clouds_file_become_options_of_accel_sagemaker(file):
    converted = convert(read_file(file()))

    assert converted.config == {
        "mixed_precision": "bf16",
        "launch": {"launcher": "sagemaker", "nodes": 2},
        "sagemaker": OPTIONS | VERSIONS,
    }
    assert converted.dropped.keys() == {"debug"}


def test_a_job_that_is_not_distributed_has_one_process_a_host(file):
    assert convert(read_file(file("NO"))).config["launch"]["processes_per_node"] == 1


def test_the_image_wins_over_versions_as_in_accelerate(file):
    assert convert(read_file(file(more="image_uri: mine\n"))).config["sagemaker"] == OPTIONS | {
        "image": "mine"
    }


def test_a_kind_that_is_not_served_is_refused(file):
    with pytest.raises(
        ConfigError, match="distributed_type MODEL_PARALLEL of a job of SageMaker is not one of NO, D"
    ):
        read_file(file("MODEL_PARALLEL"))


def test_a_place_that_is_none_is_refused(tmp_path):
    (tmp_path / "cloud.yaml").write_text("compute_environment: AZURE\n")

    with pytest.raises(
        ConfigError, match="compute_environment AZURE is not one of LOCAL_MACHINE, AMAZON_SAGEMAKER"
    ):
        read_file(str(tmp_path / "cloud.yaml"))


def test_arguments_of_the_old_sdk_are_named_with_the_reason(file):
    asked = parse(["--config_file", file(more="additional_args: {keep: 1}\n"), "train.py"], None)

    assert asked.dropped == {
        "additional_args": "they are arguments of the SageMaker SDK's version 2; give ModelTrainer's as"
        " sagemaker.arguments"
    }


def test_accelerate_launch_hands_a_clouds_job_over(file, tmp_path, monkeypatch, run_command):
    accel = tmp_path / "accel"
    accel.write_text(
        "#!/usr/bin/env python3\nimport json, os, sys\n"
        f"json.dump([sys.argv[1:], dict(os.environ)], open({str(tmp_path / 'told')!r}, 'w'))\nsys.exit(7)\n"
    )
    accel.chmod(0o755)
    monkeypatch.setattr(workers, "accel", lambda: str(accel))
    keys = ["--aws_access_key_id", "me", "--aws_secret_access_key", "hidden"]

    code = workers.launch(parse(["--config_file", file(), *keys, "train.py", "--lr", "1"], None))

    words, variables = json.loads((tmp_path / "told").read_text())
    assert code == 7
    assert words[0] == "submit"
    assert words[-3:] == ["train.py", "--lr", "1"]
    flags = {f"--sagemaker.{name.replace('_', '-')}={text}" for name, text in (OPTIONS | VERSIONS).items()}
    assert set(words[1:-3]) == {"--launcher=sagemaker", "--nodes=2", *flags}
    assert variables["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert (variables["AWS_ACCESS_KEY_ID"], variables["AWS_SECRET_ACCESS_KEY"]) == ("me", "hidden")
    assert "hidden" not in " ".join(words)
    assert "AWS_SECRET_ACCESS_KEY" not in os.environ

"""Requests as plain values, hosts, and what is refused before the SDK is asked."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from accel_core import Job, LaunchConfig, LaunchError
from accel_sagemaker.config import SageMakerConfig
from accel_sagemaker.hosts import Hosts
from accel_sagemaker.launcher import SageMakerLauncher
from accel_sagemaker.request import request

COMMAND = (sys.executable, "-m", "accel_core", "launch")
LEAST = {"instance_type": "ml.g5", "role": "train", "image": "i"}
HOSTS = {"SM_HOSTS": '["algo-2", "algo-1"]', "SM_CURRENT_HOST": "algo-2", "TRAINING_JOB_NAME": "ours"}


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    for name in ("ACCEL_CONFIG", "ACCEL_LAUNCH_CONFIG", "ACCEL_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "src").mkdir()
    for file in ("train.py", "src/train.py", "src/accel.yaml"):
        (tmp_path / file).write_text("")
    monkeypatch.chdir(tmp_path)


def job(*words: str, **more) -> Job:
    return Job(argv=(), command=(*COMMAND, *words), **more)


@pytest.fixture
def hosts(monkeypatch):
    for name, text in HOSTS.items():
        monkeypatch.setenv(name, text)


def test_the_script_and_the_config_are_named_from_the_folder_that_is_sent():
    config = SageMakerConfig(source_dir="src", **LEAST)
    words = (
        f"--config={Path.cwd()}/src/accel.yaml",
        "--nodes=2",
        "src/train.py",
        "src/train.py",
        "--config=a",
    )

    asked = request(job(*words), config)

    sent = ["--config=accel.yaml", "--nodes=2", "train.py", "src/train.py", "--config=a"]
    assert asked.source_code["args"] == sent  # those after the script are the script's own


def test_a_module_is_named_as_it_is():
    assert request(job("-m", "train"), SageMakerConfig(**LEAST)).source_code["args"] == ["-m", "train"]


def test_a_folder_above_is_sent_whole(monkeypatch):
    monkeypatch.chdir("src")

    asked = request(job("train.py"), SageMakerConfig(source_dir="..", **LEAST))

    assert asked.source_code["source_dir"] == str(Path.cwd().parent)
    assert asked.source_code["args"] == ["src/train.py"]


@pytest.mark.parametrize(
    "words", [["train.py"], ["src/../train.py"], ["--config=/elsewhere/accel.yaml", "src/train.py"]]
)
def test_a_file_that_is_not_sent_is_refused(words):
    with pytest.raises(
        LaunchError, match=r"is not in .*src, the folder that is sent \(sagemaker.source_dir\)\n"
    ):
        request(job(*words), SageMakerConfig(source_dir="src", **LEAST))


def test_accels_variables_travel_and_paths_of_this_machine_do_not(monkeypatch):
    monkeypatch.setenv("ACCEL_CONFIG", "/here/accel.yaml")
    monkeypatch.setenv("ACCEL_LAUNCH_VARIABLES", '{"TOY_MODE": "slow"}')
    monkeypatch.setenv("ACCEL__SEED", "7")

    told = request(job("train.py"), SageMakerConfig(**LEAST)).trainer["environment"]
    assert told["ACCEL__SEED"] == "7"
    assert {"ACCEL_CONFIG", "ACCEL_LAUNCH_VARIABLES"}.isdisjoint(told)


@pytest.mark.parametrize(
    ("left", "said"),
    [
        (
            "instance_type",
            "sagemaker.instance_type is not set\nname it, for example --sagemaker.instance-type ml",
        ),
        ("role", "sagemaker.role is not set\nname it, for example --sagemaker.role arn"),
        ("image", "sagemaker.image is not set\nname an image with --sagemaker.image, or Hugging Face's"),
    ],
)
def test_what_a_job_needs_is_named(left, said):
    given = {name: text for name, text in LEAST.items() if name != left}

    with pytest.raises(LaunchError, match=said):
        request(job("train.py"), SageMakerConfig(**given))


def test_an_elastic_job_is_refused():
    with pytest.raises(LaunchError, match="SageMaker ends a job that loses a host"):
        request(job("train.py", nodes=2, min_nodes=1), SageMakerConfig(**LEAST))


def test_a_place_that_would_make_each_host_node_0_is_refused():
    with pytest.raises(LaunchError, match=r"every host would be node 0 there\nleave it out"):
        request(job("train.py", nodes=2, rendezvous="algo-1:29500"), SageMakerConfig(**LEAST))


@pytest.mark.parametrize(
    ("text", "said"), [(None, "cannot be read"), ("title\na b\n", "has a line without two columns: 'a b'")]
)
def test_a_file_that_is_no_table_is_refused(text, said):
    if text is not None:
        Path("inputs.tsv").write_text(text)

    with pytest.raises(LaunchError, match=rf"sagemaker.inputs_file inputs.tsv .*{said}"):
        request(job("train.py"), SageMakerConfig(inputs_file="inputs.tsv", **LEAST))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"image": "i", "py_version": "py312"}, "image and py_version name two images"),
        ({"role": ""}, "role is empty; name it, or leave it out"),
        ({"transformers_version": "4"}, "transformers_version alone names no image; add pytorch_version"),
        ({"arguments": {"compute": {}}}, "arguments have compute, which launch.nodes and"),
    ],
)
def test_options_that_contradict_are_refused(options, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        SageMakerConfig(**options)


@pytest.mark.usefixtures("hosts")
def test_a_host_is_a_node():
    found = SageMakerLauncher(SageMakerConfig(), None).allocation(LaunchConfig())

    assert (found.nodes, found.node_rank, found.address, found.job_id) == (2, 1, "algo-1", "sagemaker-ours")


@pytest.mark.usefixtures("hosts")
def test_another_number_of_hosts_than_asked_for_is_refused():
    with pytest.raises(
        LaunchError, match=r"3 nodes were asked for \(launch.nodes\), and job ours .* has 2 hosts"
    ):
        SageMakerLauncher(SageMakerConfig(), None).allocation(LaunchConfig(nodes=3))


@pytest.mark.usefixtures("hosts")
def test_a_place_that_the_user_names_is_the_users_to_divide():
    launch = LaunchConfig(nodes=2, node_rank=1, rendezvous="algo-1:29500")

    assert SageMakerLauncher(SageMakerConfig(), None).allocation(launch) is None


def test_elsewhere_and_on_one_host_there_is_no_allocation(monkeypatch):
    launcher = SageMakerLauncher(SageMakerConfig(), None)
    assert launcher.allocation(LaunchConfig()) is None
    for name, text in {**HOSTS, "SM_HOSTS": '["algo-2"]'}.items():
        monkeypatch.setenv(name, text)

    assert launcher.allocation(LaunchConfig()) is None


@pytest.mark.parametrize(
    "change", [{"SM_HOSTS": "algo-1"}, {"SM_CURRENT_HOST": "b"}, {"TRAINING_JOB_NAME": ""}]
)
def test_variables_that_tell_no_place_are_named(change):
    with pytest.raises(LaunchError, match="tell no place in a job of SageMaker\nstart this as"):
        Hosts.around({**HOSTS, **change})


def test_without_the_sdk_the_arguments_are_shown_and_nothing_is_sent(run_command):
    words = ["--launcher", "sagemaker", "--nodes", "2"]
    words += [
        word for name, text in LEAST.items() for word in (f"--sagemaker.{name.replace('_', '-')}", text)
    ]

    def submit(*more: str) -> subprocess.CompletedProcess[str]:
        command = [*COMMAND[:3], "submit", *more, *words, "train.py"]
        return run_command(command, capture_output=True, text=True, check=False)

    shown = submit("--dry-run")
    assert shown.returncode == 0, shown.stderr
    asked = yaml.safe_load(shown.stdout[shown.stdout.index("\nimage: ") :])
    assert asked["compute"] == {"instance_type": "ml.g5", "instance_count": 2}
    sent = submit()
    assert sent.returncode == 1
    assert sent.stderr.startswith("accel: the SageMaker SDK of version 3 is not installed here: ")


def test_options_of_a_job_that_is_handed_over_start_nothing_here(monkeypatch):
    monkeypatch.delenv("SM_HOSTS", raising=False)

    with pytest.raises(LaunchError, match="options of section sagemaker are of jobs that are handed over"):
        SageMakerLauncher(SageMakerConfig(role="train"), None).launch(Job(argv=("true",)))

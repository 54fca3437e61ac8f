"""Accelerate's commands as programs call them, and what its config files are as objects."""

from __future__ import annotations

import io
import json
import logging
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

import pytest
import yaml
from accelerate.commands import env, estimate, launch, test, to_fsdp2, tpu
from accelerate.commands.config.config_args import ClusterConfig, SageMakerConfig, load_config_from_file
from accelerate.utils import ComputeEnvironment, DistributedType
from accelerate.utils import launch as launching
from peers import needs_accelerate, said

from accel_compat import notices
from accel_compat.launch import (
    commands,
    config_file,
    config_questions,
    convert,
    request,
    worker_commands,
    workers,
)

PARSED = """
import json
from accelerate.commands.launch import launch_command_parser
lines = ["x.py"], ["-m", "x", "--num-processes", "2", "--debug", "--lr", "1"]
shown = [vars(launch_command_parser().parse_args(line)) for line in lines]
print(json.dumps([{**read, "nondefault": sorted(read["nondefault"])} for read in shown]))
"""
FILE = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
debug: true
fsdp_config:
  fsdp_sharding_strategy: SHARD_GRAD_OP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_sync_module_states: false
  fsdp_offload_params: false
  own: 5
mixed_precision: bf16
num_processes: 1
tpu_name: pod
tpu_zone: here
commands: [ls]
"""


@pytest.fixture(autouse=True)
def nobody_has_a_config_of_ones_own(monkeypatch, tmp_path):
    monkeypatch.setattr(config_file, "default_config_file", str(tmp_path / "none.yaml"))


@pytest.fixture
def file(tmp_path) -> str:
    path = tmp_path / "config.yaml"
    path.write_text(FILE)
    return str(path)


@needs_accelerate
def test_a_command_line_is_parsed_as_there(run_processes):
    for theirs, ours in zip(
        said(run_processes, PARSED, ours=False), said(run_processes, PARSED, ours=True), strict=True
    ):
        assert {name: ours.get(name, "absent") for name in theirs} == theirs


def test_each_flag_is_shown_in_one_spelling():
    shown = launch.launch_command_parser().format_help()

    assert shown.count("--num-processes") == 1
    assert "--num_machines" in shown
    assert "--num-machines" not in shown


@pytest.mark.parametrize(
    "made",
    [
        launch.launch_command_parser,
        env.env_command_parser,
        estimate.estimate_command_parser,
        test.test_command_parser,
        to_fsdp2.to_fsdp2_command_parser,
        tpu.tpu_command_parser,
    ],
)
def test_a_command_can_be_another_programs_subcommand(made):
    several = ArgumentParser().add_subparsers()

    assert callable(made(several).get_default("func"))
    assert list(several.choices)


def test_the_config_file_fills_in_what_was_not_given(file):
    args = launch.launch_command_parser().parse_args(
        ["--config_file", file, "--fsdp_offload_params", "true", "x.py"]
    )
    found, defaults, from_file = launch._validate_launch_command(args)

    assert found is args
    assert (args.debug, args.use_fsdp, args.num_processes, args.mixed_precision) == (True, True, 1, "bf16")
    assert (args.fsdp_sync_module_states, args.fsdp_offload_params) == (False, "true")
    assert from_file
    assert isinstance(defaults, ClusterConfig)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cpu", "--multi_gpu"], "only use one of"),
        (["--multi_gpu", "--num_processes", "1"], "at least 2 processes"),
        (["--use_parallelism_config"], "without `--use_fsdp`"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(words, message):
    args = launch.launch_command_parser().parse_args([*words, "x.py"])
    with pytest.raises(ValueError, match=message):
        launch.launch_command(args)


def test_a_config_is_an_object_that_can_be_written_and_read(file, tmp_path):
    found = load_config_from_file(file)
    assert isinstance(found, ClusterConfig)
    assert found.distributed_type is DistributedType.FSDP
    assert found.compute_environment is ComputeEnvironment.LOCAL_MACHINE
    assert (found.deepspeed_config, found.num_machines, found.use_cpu) == ({}, 1, False)

    found.to_yaml_file(str(tmp_path / "again.yaml"))
    found.to_json_file(str(tmp_path / "again.json"))
    assert load_config_from_file(str(tmp_path / "again.yaml")) == found
    assert ClusterConfig.from_json_file(str(tmp_path / "again.json")) == found


def test_a_config_of_a_cloud_has_a_class_of_its_own(tmp_path):
    cloud = tmp_path / "cloud.json"
    cloud.write_text(
        json.dumps(
            {
                "compute_environment": "AMAZON_SAGEMAKER",
                "distributed_type": "NO",
                "ec2_instance_type": "big",
                "iam_role_name": "me",
            }
        )
    )

    assert isinstance(load_config_from_file(str(cloud)), SageMakerConfig)


def test_old_configs_are_understood_and_unknown_keys_are_not():
    old = ClusterConfig.process_config({"distributed_type": "NO", "fp16": True, "dynamo_backend": "EAGER"})
    assert (old["mixed_precision"], old["dynamo_config"]) == ("fp16", {"dynamo_backend": "EAGER"})
    assert old["num_processes"] == 1
    with pytest.raises(ValueError, match="must be specified"):
        ClusterConfig.process_config({})


def test_unknown_keys_are_named(tmp_path):
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("distributed_type: 'NO'\nbb: 1\naa: 2\n")
    with pytest.raises(ValueError, match=r"had unknown keys \(\['aa', 'bb'\]\)"):
        load_config_from_file(str(wrong))


def test_a_config_for_fsdp_1_becomes_one_for_fsdp_2(file, tmp_path, caplog):
    parser, after = to_fsdp2.to_fsdp2_command_parser(), str(tmp_path / "after.yaml")
    with caplog.at_level(logging.WARNING):
        to_fsdp2.to_fsdp2_command(parser.parse_args(["--config_file", file, "--output_file", after]))

    assert to_fsdp2.load_config(after)["fsdp_config"] == {
        "fsdp_reshard_after_forward": False,
        "fsdp_offload_params": False,
        "own": 5,
        "fsdp_version": 2,
    }
    assert "fsdp_backward_prefetch has been removed in FSDP2" in caplog.text
    with pytest.raises(FileExistsError):
        to_fsdp2.to_fsdp2_command(parser.parse_args(["--config_file", file, "--output_file", after]))
    with pytest.raises(ValueError, match="--output_file must be provided"):
        to_fsdp2.to_fsdp2_command(parser.parse_args(["--config_file", file]))
    to_fsdp2.to_fsdp2_command(parser.parse_args(["--config_file", file, "--overwrite"]))
    assert to_fsdp2.load_config(file)["fsdp_config"]["fsdp_version"] == 2


@pytest.mark.parametrize(
    ("words", "commands"),
    [
        ([], "ls"),
        (["--command", "pwd", "--command", "df -h"], "pwd; df -h"),
        (["--install_accelerate"], "pip install accelerate -U; ls"),
        (["--install_accelerate", "--accelerate_version", "1.2.0"], "pip install accelerate==1.2.0; ls"),
    ],
)
def test_commands_for_a_pods_hosts_go_to_googles_program(file, capsys, words, commands):
    tpu.tpu_command_launcher(tpu.tpu_command_parser().parse_args(["--config_file", file, "--debug", *words]))

    assert capsys.readouterr().out == (
        "Running gcloud compute tpus tpu-vm ssh pod --zone here"
        f" --command cd /usr/share; {commands} --worker all\n"
    )


def parsed(*words: str) -> Namespace:
    args = launch.launch_command_parser().parse_args([*words, "x.py", "--lr", "1"])
    return launch._validate_launch_command(args)[0]


@pytest.mark.parametrize("called", [launch._validate_launch_command, launch.launch_command])
def test_one_device_is_too_few_for_a_config_of_several(tmp_path, called):
    written = tmp_path / "several.yaml"
    written.write_text("distributed_type: MULTI_GPU\nnum_processes: 2\ngpu_ids: '0'\n")
    args = launch.launch_command_parser().parse_args(["--config_file", str(written), "x.py"])

    with pytest.raises(ValueError, match="Less than two GPU ids were configured"):
        called(args)


def test_one_processs_command_and_variables():
    command, found = launching.prepare_simple_launcher_cmd_env(parsed("--cpu", "--mixed_precision", "bf16"))

    assert command == [sys.executable, "x.py", "--lr", "1"]
    assert (found["ACCELERATE_USE_CPU"], found["ACCELERATE_MIXED_PRECISION"]) == ("True", "bf16")
    assert (found["ACCELERATE_DYNAMO_BACKEND"], found["KMP_BLOCKTIME"]) == ("NO", "1")


def test_affinity_is_asked_for_by_its_variable():
    args = parsed("--cpu", "--enable_cpu_affinity")

    assert launching.prepare_simple_launcher_cmd_env(args)[1]["ACCELERATE_CPU_AFFINITY"] == "1"


def test_with_a_hostfile_mpirun_starts_it(monkeypatch):
    monkeypatch.setattr(worker_commands, "which", lambda program: True)
    monkeypatch.setattr(worker_commands.subprocess, "check_output", lambda words: b"Open MPI 5")
    args = parsed("--cpu", "--mpirun_hostfile", "hosts", "--num_processes", "4")
    command, found = launching.prepare_simple_launcher_cmd_env(args)

    assert command[:9] == [
        "mpirun",
        "--hostfile",
        "hosts",
        "--npernode",
        "4",
        "-n",
        "4",
        "--bind-to",
        "socket",
    ]
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("127.0.0.1", "29500")


def test_torchruns_arguments_and_its_workers_variables():
    args = parsed("--use_fsdp", "--num_processes", "2", "--main_process_port", "0")
    found = launching.prepare_multi_gpu_env(args)

    assert args.nproc_per_node == "2"
    assert int(args.master_port) > 0
    assert (found["ACCELERATE_USE_FSDP"], found["FSDP_SHARDING_STRATEGY"]) == ("true", "FULL_SHARD")


def test_arguments_that_a_program_makes_by_hand_may_lack_flags():
    args = parsed("--num_processes", "1", "--main_process_port", "0")
    del args.cpu, args.use_fsdp

    assert launching.prepare_multi_gpu_env(args)["ACCELERATE_MIXED_PRECISION"] == "no"
    assert int(args.master_port) > 0


def test_an_unknown_precision_is_refused_with_the_known_ones():
    args = parsed()
    args.mixed_precision = "fp61"
    with pytest.raises(ValueError, match=r"Unknown mixed_precision mode: fp61\. Choose between"):
        launching.prepare_simple_launcher_cmd_env(args)


def test_a_scripts_arguments_as_a_cloud_takes_them():
    words = ["--name", "bert", "--train", "False", "--lr", "5e-5", "--steps", "3"]

    assert launching._convert_nargs_to_dict(words) == {"name": "bert", "train": False, "lr": 5e-5, "steps": 3}
    with pytest.raises(ValueError, match="store_true"):
        launching._convert_nargs_to_dict(["--train", "--lr", "1"])


ESTIMATE = """
import argparse, contextlib, io, json
from torch import nn
from accelerate.commands import estimate
model = nn.Sequential(nn.Linear(300, 400), nn.Sequential(nn.Linear(400, 400), nn.LayerNorm(400)))
estimate.create_empty_model = lambda *_, **__: model
import io
import sys
for module in list(sys.modules.values()):
    if getattr(module, "__name__", "").endswith("memory_estimate"):
        module.create_empty_model = estimate.create_empty_model
shown = []
for name in ("net", "a name that is a good deal longer than all the columns together, so that they widen"):
    with contextlib.redirect_stdout(io.StringIO()) as said:
        words = [name, "--dtypes", "float32", "float16", "int8", "int4"]
        estimate.estimate_command(estimate.estimate_command_parser().parse_args(words))
    shown.append([line.replace(" ", "") for line in said.getvalue().splitlines() if "─" not in line])
shown += [estimate.estimate_training_usage(1000, kind) for kind in ("float32", "bfloat16", "fp8", "int8")]
print(json.dumps(shown))
"""


@needs_accelerate
def test_the_memory_that_a_model_takes_is_told_in_the_same_columns(run_processes):
    assert said(run_processes, ESTIMATE, ours=True) == said(run_processes, ESTIMATE, ours=False)


@pytest.mark.needs("accel-big-models")
def test_the_script_estimates_a_model_from_its_folder(tmp_path, monkeypatch, capsys):
    config = {"model_type": "bert", "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1, "vocab_size": 16}))
    assert script(monkeypatch, "estimate-memory", str(tmp_path), "--dtypes", "float32") in (0, None)

    shown = capsys.readouterr().out
    assert "Largest Layer" in shown
    assert "Training using Adam" in shown
    assert script(monkeypatch, "estimate-memory", "resnet", "--library_name", "timm") != 0


def script(monkeypatch, *words: str) -> object:
    monkeypatch.setattr(sys, "argv", ["accelerate", *words])
    with pytest.raises(SystemExit) as ended:
        commands.accelerate()
    return ended.value.code


def test_the_script_lists_its_commands(monkeypatch, capsys):
    assert script(monkeypatch, "--help") == 0
    assert "to-fsdp2" in capsys.readouterr().out


def test_the_script_alone_lists_its_commands_and_fails(monkeypatch, capsys):
    assert script(monkeypatch) == 1
    assert "to-fsdp2" in capsys.readouterr().out


def test_an_unknown_command_is_a_mistake_of_the_command_line(monkeypatch, capsys):
    assert script(monkeypatch, "lunch") == 2
    assert "invalid choice: 'lunch'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [["--cpu", "--use_fsdp"], ["--multi_gpu", "--use_deepspeed"], ["--multi_gpu", "--num_processes=1"]],
)
def test_the_script_launches_nothing_by_flags_that_contradict(monkeypatch, tmp_path, words):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr(workers, "launch", lambda request: 0)
    said = script(monkeypatch, "launch", *words, "x.py")
    assert "You " in str(said)
    assert str(said).endswith("correct the flags; `accelerate launch --help` lists them")


def test_the_script_says_in_a_line_what_is_wrong(monkeypatch):
    assert "Config file nowhere.yaml not found" in str(
        script(monkeypatch, "to-fsdp2", "--config_file", "nowhere.yaml")
    )


@pytest.mark.full
def test_the_script_tests_processes(monkeypatch, tmp_path, capfd, run_command):
    Path(tmp_path, "two.yaml").write_text("distributed_type: MULTI_CPU\nnum_processes: 2\nuse_cpu: true\n")

    assert script(monkeypatch, "test", "--config_file", str(tmp_path / "two.yaml")) == 0
    shown = capfd.readouterr().out
    assert "2 process(es) on cpu: communication, data and training are right" in shown
    assert "Test is a success!" in shown


@pytest.mark.parametrize(
    ("answers", "options"),
    [({}, ("2", None, None)), ({"fsdp_version": "1"}, ("1", "FULL_SHARD", "false"))],
    ids=["by default FSDP 2", "FSDP 1"],
)
def test_questions_write_a_file_that_launch_reads(monkeypatch, tmp_path, capsys, answers, options):
    path = tmp_path / "asked" / "config.yaml"
    answers = {"num_processes": "2", **answers}
    monkeypatch.setattr(config_questions.click, "prompt", prompts(distributed="FSDP", **answers))
    monkeypatch.setattr(config_questions.click, "confirm", lambda *_, default: default)
    config_questions.config_command(Namespace(config_file=str(path)))

    read = request.read_file(str(path))
    assert (read["num_processes"], read["use_fsdp"]) == (2, True)
    asked = ("fsdp_version", "fsdp_sharding_strategy", "fsdp_forward_prefetch")
    assert tuple(read.get(name) for name in asked) == options
    assert load_config_from_file(str(path)).distributed_type == DistributedType.FSDP
    assert f"saved at {path}" in capsys.readouterr().out


def prompts(distributed: str, **answers: str):
    """Answers by the start of a question; else its default."""

    def prompt(text: str, default: str = "", **_: object) -> str:
        named = text.partition(":")[0]
        return distributed if named.startswith("How") else answers.get(named, default)

    return prompt


def test_update_writes_a_file_again_with_todays_keys(tmp_path, file):
    assert config_questions.update_config(Namespace(config_file=file)) == file
    assert "num_machines: 1" in Path(file).read_text()
    with pytest.raises(ValueError, match="nowhere doesn't exist"):
        config_questions.update_config(Namespace(config_file="nowhere"))


def test_a_basic_config_has_all_keys(tmp_path):
    written = json.loads(
        Path(str(config_file.write_basic_config("bf16", str(tmp_path / "basic.json")))).read_text()
    )
    assert {"num_machines", "machine_rank", "rdzv_backend", "main_training_function"} <= written.keys()


def test_an_error_in_a_config_file_names_the_file(tmp_path):
    file = tmp_path / "torn.yaml"
    file.write_text("num_processes: [1\n")
    with pytest.raises(yaml.YAMLError, match=r"torn\.yaml"):
        load_config_from_file(str(file))


def test_fp8_in_a_basic_config_names_what_this_machine_lacks(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(convert, "plugin_status", lambda name: "missing")
    monkeypatch.setattr(notices, "_warned", set())
    config_file.write_basic_config("fp8", str(tmp_path / "basic.json"))
    assert "fp8 needs accel-torchao or accel-transformer-engine" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["config", "update"], ["to-fsdp2", "--overwrite"]], ids=" ".join)
def test_a_file_that_is_not_yaml_is_named_and_left_alone(monkeypatch, tmp_path, command):
    path = tmp_path / "config.yaml"
    path.write_text("a: b: c\n")
    monkeypatch.setattr(sys, "argv", ["accelerate", *command, "--config_file", str(path)])
    with pytest.raises(SystemExit, match=r"(?s)mapping values are not allowed here.*config\.yaml"):
        commands.accelerate()
    assert path.read_text() == "a: b: c\n"


def test_questions_that_are_left_write_nothing(monkeypatch, tmp_path, capsys):
    path = tmp_path / "config.yaml"
    monkeypatch.setattr(sys, "argv", ["accelerate", "config", "--config_file", str(path)])
    monkeypatch.setattr(sys, "stdin", io.StringIO("NO\n"))
    with pytest.raises(SystemExit, match="config: the answers ended before the questions.*\nanswer each"):
        commands.accelerate()
    assert not path.exists()

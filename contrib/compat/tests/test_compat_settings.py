"""Flags of `accelerate launch` and files of `accelerate config`, and what becomes of them."""

from __future__ import annotations

from argparse import Namespace
from subprocess import CompletedProcess

import click
import pytest
import yaml
from accelerate.utils import write_basic_config
from click.testing import CliRunner

from accel_compat.launch.commands import compat
from accel_compat.launch.config_questions import config_command
from accel_compat.launch.convert import convert
from accel_compat.launch.request import parse, read_file
from accel_compat.launch.workers import command, environment, launch
from accel_core import ConfigError, discover
from accel_core.config.resolve import load

OLD = """\
compute_environment: LOCAL_MACHINE
deepspeed_config: {}
distributed_type: 'NO'
fsdp_config: {}
machine_rank: 0
main_process_ip: null
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 4
use_cpu: true
"""
FSDP = """\
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: Block
  fsdp_offload_params: false
mixed_precision: 'no'
num_machines: 2
num_processes: 8
main_process_ip: 10.0.0.1
main_process_port: 29501
machine_rank: 1
"""
DEEPSPEED = """\
distributed_type: DEEPSPEED
deepspeed_config:
  zero_stage: 3
  gradient_accumulation_steps: 2
  offload_optimizer_device: cpu
  zero3_init_flag: true
num_processes: 2
"""


def written(tmp_path, text):
    file = tmp_path / "default_config.yaml"
    file.write_text(text)
    return str(file)


def test_flags_come_in_both_spellings():
    asked = parse(["--num_processes", "2", "--mixed-precision", "bf16", "train.py", "--lr", "1"], None)

    assert asked.settings == {"num_processes": 2, "mixed_precision": "bf16"}
    assert list(asked.target) == ["train.py", "--lr", "1"]


def test_a_flag_counts_though_it_is_given_its_default():
    asked = parse(["--fsdp_sync_module_states", "true", "train.py"], None)

    assert asked.settings == {"fsdp_sync_module_states": "true"}


def test_a_port_of_zero_is_any_free_one():
    assert command(parse(["--main_process_port", "0", "train.py"], None))[2:] == ["train.py"]


def test_the_devices_asked_for_are_those_of_whatever_kind_there_is():
    found = environment(parse(["--gpu_ids", "0,2", "train.py"], None).settings)

    assert (found["CUDA_VISIBLE_DEVICES"], found["ASCEND_RT_VISIBLE_DEVICES"]) == ("0,2", "0,2")


def test_a_program_that_is_no_python_is_refused():
    with pytest.raises(ConfigError, match="no_python: workers are Python programs here"):
        launch(parse(["--no_python", "train.sh"], None))


def test_a_flag_wins_over_the_file(tmp_path):
    asked = parse(["--config_file", written(tmp_path, OLD), "--num_processes", "2", "train.py"], None)

    assert command(asked)[2:] == ["--device=cpu", "--processes-per-node=2", "train.py"]
    assert environment(asked.settings)["ACCELERATE_MIXED_PRECISION"] == "bf16"


@pytest.mark.parametrize("flag", ["use_deepspeed", "multi_gpu"])
def test_a_flag_replaces_the_strategy_of_the_file(tmp_path, flag):
    asked = parse(["--config_file", written(tmp_path, FSDP), f"--{flag}", "train.py"], None)
    told = environment(asked.settings)

    assert "ACCELERATE_USE_FSDP" not in told
    assert ("ACCELERATE_USE_DEEPSPEED" in told) == (flag == "use_deepspeed")
    assert convert(asked.settings).config.get("strategy") == (
        "deepspeed" if flag == "use_deepspeed" else None
    )


@pytest.mark.parametrize("file", ["", FSDP])
def test_two_strategies_at_once_are_refused(tmp_path, file):
    words = ["--use_fsdp", "--use_deepspeed", "train.py"]
    with pytest.raises(ConfigError, match="only use one of .*`--use_deepspeed`, `--use_fsdp` at a time"):
        parse(["--config_file", written(tmp_path, file or OLD), *words], None)


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--dynamo_backend", "eagr", "invalid choice: 'eagr'"),
        ("--dynamo_mode", "fast", "invalid choice: 'fast'"),
        ("--fp8_format", "E5M3", "invalid choice: 'E5M3'"),
        ("--fsdp_version", "3", "invalid choice: '3'"),
        ("--num_processes", "two", "invalid int value: 'two'"),
    ],
)
def test_a_flags_wrong_value_is_refused_without_another_flags_name(capsys, flag, value, said):
    with pytest.raises(SystemExit):
        parse([flag, value, "train.py"], None)
    told = capsys.readouterr().err
    assert said in told
    assert "did you mean" not in told
    assert parse(["--dynamo_backend", "INDUCTOR", "train.py"], None).settings["dynamo_backend"] == "inductor"


def test_the_default_file_is_read_where_there_is_one(tmp_path):
    from pathlib import Path

    asked = parse(["train.py"], Path(written(tmp_path, OLD)))

    assert asked.settings["num_processes"] == 4


def test_machines_share_out_the_processes(tmp_path):
    asked = parse(["--config_file", written(tmp_path, FSDP), "train.py"], None)
    machines = ["--processes-per-node=4", "--nodes=2", "--node-rank=1", "--rendezvous=10.0.0.1:29501"]

    assert command(asked)[2:] == [*machines, "train.py"]


@pytest.mark.parametrize("read", [command, lambda asked: convert(asked.settings)], ids=["launch", "import"])
def test_processes_that_cannot_be_shared_out_are_refused(read):
    with pytest.raises(ConfigError, match="num_processes 3 is not a multiple of num_machines 2"):
        read(parse(["--num_processes", "3", "--num_machines", "2", "train.py"], None))


def test_the_port_of_one_machine_is_imported():
    assert convert({"main_process_port": 29501}).config == {"launch": {"rendezvous": "127.0.0.1:29501"}}


def test_a_strategys_settings_become_its_variables(tmp_path):
    found = environment(read_file(written(tmp_path, FSDP)))

    assert found["ACCELERATE_USE_FSDP"] == "true"
    assert found["FSDP_TRANSFORMER_CLS_TO_WRAP"] == "Block"
    assert found["FSDP_OFFLOAD_PARAMS"] == "false"


def test_what_has_no_meaning_here_is_named_with_the_reason():
    asked = parse(["--rdzv_backend", "c10d", "--tee", "3", "train.py"], None)

    assert set(asked.dropped) == {"rdzv_backend", "tee"}
    assert asked.settings == {}


@pytest.mark.parametrize("asked", ["default", "questions", "theirs"])
def test_what_config_writes_unasked_is_no_news(tmp_path, asked):
    file = tmp_path / "config.yaml"
    if asked == "default":
        write_basic_config(save_location=str(file))
    elif asked == "questions":
        CliRunner().invoke(  # a Click command, so that the questions are answered
            click.command()(lambda: config_command(Namespace(config_file=str(file)))),
            input="MULTI_CPU\n1\n2\nbf16\nn\n",
        )
    else:
        file.write_text(
            "downcast_bf16: 'no'\nmain_training_function: main\nrdzv_backend: static\nsame_network: true\n"
            "tpu_env: []\ntpu_use_cluster: false\ntpu_use_sudo: false\nuse_cpu: true\n"
        )

    assert file.read_text().count("same_network") == 1
    assert parse(["--config_file", str(file), "train.py"], None).dropped == {}


def test_unknown_keys_are_refused(tmp_path):
    with pytest.raises(ConfigError) as refused:
        read_file(written(tmp_path, OLD + "num_proceses: 1\nanother_key: 2\nfsdp_confg: {}\n"))
    assert [line.partition("default_config.yaml:")[2] for line in str(refused.value).splitlines()[:-1]] == [
        "12: Accelerate 1.15 has no key num_proceses; did you mean num_processes?",
        "13: Accelerate 1.15 has no key another_key",
        "14: Accelerate 1.15 has no key fsdp_confg; did you mean fsdp_config?",
    ]


def test_unknown_keys_of_a_section_are_refused_with_line_and_nearest_name(tmp_path):
    text = FSDP.replace("fsdp_offload_params", "fsdp_offload_parms")
    with pytest.raises(
        ConfigError, match=r":5: .*fsdp_config\.fsdp_offload_parms; did you mean fsdp_offload_params"
    ):
        read_file(written(tmp_path, text))


@pytest.mark.parametrize(
    ("line", "wanted"),
    {
        "num_processes: two": "num_processes is 'two', not a number of 1 or more",
        "use_cpu: maybe": "use_cpu is 'maybe', not true or false",
        "mixed_precision: bf61": "mixed_precision is 'bf61', not one of no, fp16, bf16, fp8",
        "main_process_port: http": "main_process_port is 'http', not a number",
        "mpirun_config: 3": "mpirun_config is 3, not a section of keys and values",
        "fsdp_config: [1]": "fsdp_config is [1], not a section of keys and values",
        "dynamo_backend: INDUCTR": "dynamo_backend is 'INDUCTR', not one of no, eager,",
        "dynamo_config: {dynamo_mode: fast}": "dynamo_config.dynamo_mode is 'fast', not one of default,",
        "debug: [": "this is not YAML: expected the node content",
        "debug: true\ndebug: false": "debug is given on line 2 already",
    }.items(),
)
def test_wrong_values_are_refused_with_key_and_line(tmp_path, line, wanted):
    with pytest.raises(ConfigError) as refused:
        read_file(written(tmp_path, f"distributed_type: 'NO'\n{line}\n"))
    assert wanted in str(refused.value)
    assert "default_config.yaml:" in str(refused.value)


def test_what_deepspeeds_own_file_says_is_said_nowhere_else(tmp_path):
    file = written(tmp_path, "deepspeed_config:\n  deepspeed_config_file: ds.json\n  zero_stage: 3\n")
    with pytest.raises(ConfigError, match=r"yaml:3: deepspeed_config.zero_stage is given beside"):
        read_file(file)


def test_a_file_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match=r"there is no config file nowhere\.yaml"):
        read_file("nowhere.yaml")


def test_each_key_finds_its_place(tmp_path):
    assert convert(read_file(written(tmp_path, DEEPSPEED))).config == {
        "strategy": "deepspeed",
        "deepspeed": {
            "zero_stage": 3,
            "gradient_accumulation_steps": 2,
            "offload_optimizer_device": "cpu",
            "zero3_init_flag": True,
        },
        "launch": {"processes_per_node": 2},
    }


def test_fsdp_without_a_version_is_version_1(tmp_path):
    config = convert(read_file(written(tmp_path, FSDP))).config

    assert config["fsdp"]["fsdp_version"] == 1
    assert config["fsdp"]["transformer_cls_names_to_wrap"] == ["Block"]


def test_the_command_writes_a_file_that_accel_reads(tmp_path, run_command):
    target = tmp_path / "accel.yaml"
    done = CliRunner().invoke(compat, ["import", written(tmp_path, OLD), "-o", str(target)])

    assert done.exit_code == 0
    assert "left out main_training_function: a script is run, not imported" in done.stderr
    assert yaml.safe_load(target.read_text()) == {
        "mixed_precision": "bf16",
        "device": "cpu",
        "launch": {"nodes": 1, "node_rank": 0, "processes_per_node": 4},
    }
    again = CliRunner().invoke(compat, ["import", written(tmp_path, OLD), "-o", str(target)])
    assert again.exit_code == 1
    assert "is there already" in again.output


@pytest.mark.needs("accel-fsdp", "accel-context-parallel")
@pytest.mark.full
def test_a_file_with_a_layout_becomes_one_that_loads(tmp_path):
    sizes = {"dp_shard_size": 2, "tp_size": 2, "cp_size": 2, "cp_comm_strategy": "alltoall"}
    lines = [f"  parallelism_config_{name}: {value}\n" for name, value in sizes.items()]
    target = tmp_path / "accel.yaml"
    source = written(tmp_path, FSDP + "parallelism_config:\n" + "".join(lines))

    assert CliRunner().invoke(compat, ["import", source, "-o", str(target)]).exit_code == 0

    found = load(file=str(target), discovery=discover(), environment={})
    assert found.config.parallelism == {"dp_shard": 2, "tp": 2, "cp": 2}
    assert found.config.plugins["cp"].rotate_method == "alltoall"


def test_a_layout_in_a_file_is_used(tmp_path):
    layout = FSDP + "parallelism_config:\n  parallelism_config_cp_size: 2\n"
    file = ["--config_file", written(tmp_path, layout)]
    variables = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_CP_SIZE": "2"}

    assert variables.items() <= environment(parse([*file, "train.py"], None).settings).items()
    assert variables.items() <= environment(parse([*file, "--use_fsdp", "train.py"], None).settings).items()
    assert variables.keys().isdisjoint(environment(parse([*file, "--multi_gpu", "train.py"], None).settings))


@pytest.mark.parametrize(
    ("text", "setting", "value"),
    [
        ("fsdp_config: {offload_params: true}", "fsdp_offload_params", True),
        ("dynamo_config: {backend: EAGER}", "dynamo_backend", "EAGER"),
        ("fp16: true", "mixed_precision", "fp16"),
        ("deepspeed_config: {gradient_clipping: auto}", "gradient_clipping", "auto"),
        ("fsdp_config: {fsdp_reshard_after_forward: NO_SHARD}", "fsdp_sharding_strategy", "NO_SHARD"),
        ("fp8_config: {amax_history_length: 16}", "fp8_amax_history_length", 16),
        ("fp8_config: {amax_compute_algorithm: max}", "fp8_amax_compute_algorithm", "max"),
    ],
)
def test_what_accelerate_itself_writes_or_takes_is_read(tmp_path, text, setting, value):
    assert read_file(written(tmp_path, f"distributed_type: 'NO'\n{text}\n"))[setting] == value


def test_the_length_of_fp8s_history_is_the_one_that_the_questions_wrote():
    told = environment({"mixed_precision": "fp8", "fp8_amax_history_length": 16})

    assert told["ACCELERATE_FP8_AMAX_HISTORY_LEN"] == "16"


def test_fsdp_1_shards_as_the_questions_have_written(tmp_path):
    line = "fsdp_config:\n  fsdp_reshard_after_forward: SHARD_GRAD_OP\n"
    file = written(tmp_path, FSDP.replace("fsdp_config:\n", line))
    told = environment(parse(["--config_file", file, "train.py"], None).settings)

    assert told["FSDP_SHARDING_STRATEGY"] == "SHARD_GRAD_OP"
    assert told["FSDP_RESHARD_AFTER_FORWARD"] == "true"


@pytest.mark.parametrize(
    ("flag", "value", "wanted"),
    [
        ("num_machines", "0", "--num_machines is 0, not a number of 1 or more"),
        ("fsdp_offload_params", "maybe", "--fsdp_offload_params is 'maybe', not true or false"),
    ],
)
def test_a_flags_wrong_value_is_refused_before_anything_starts(flag, value, wanted):
    with pytest.raises(ConfigError, match=wanted):
        parse(["--num_processes", "2", f"--{flag}", value, "train.py"], None)


def test_a_variable_that_the_launcher_replaces_is_named(monkeypatch, tmp_path, capsys, run_command):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setattr("subprocess.run", lambda *words, **options: CompletedProcess(words, 0))
    launch(parse(["--mixed_precision", "fp16", "train.py"], None))
    assert "gives way" not in capsys.readouterr().err

    launch(parse(["train.py"], None))
    assert "ACCELERATE_MIXED_PRECISION=bf16 gives way to no, as in Accelerate" in capsys.readouterr().err


def test_a_bare_no_is_the_word(tmp_path):
    (tmp_path / "bare.yaml").write_text("mixed_precision: no\ndynamo_backend: NO\n")

    assert read_file(str(tmp_path / "bare.yaml")) == {"mixed_precision": "no", "dynamo_backend": "no"}


def test_a_hostfile_chooses_the_launcher_of_mpi(tmp_path):
    processes = {"num_processes": 4, "num_machines": 2}
    file = written(
        tmp_path, "mpirun_config: {mpirun_hostfile: hosts, mpirun_ccl: '2'}\nmain_process_port: 29500\n"
    )
    asked = parse(["--config_file", file, "--num_processes", "4", "--num_machines", "2", "train.py"], None)
    mpi = ["--launcher=mpi", "--mpi.hostfile=hosts", "--mpi.ccl-workers=2"]
    assert command(asked)[2:] == ["--processes-per-node=2", "--nodes=2", *mpi, "train.py"]

    converted = convert({"mpirun_hostfile": "hosts", "mpirun_ccl": "2", **processes})

    assert converted.dropped == {}
    assert converted.config == {
        "mpi": {"hostfile": "hosts", "ccl_workers": 2},
        "launch": {"nodes": 2, "processes_per_node": 2, "launcher": "mpi"},
    }

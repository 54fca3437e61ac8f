"""`accelerate launch`: what workers are told, what its flags say, and how it is called as a module."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest
import yaml
from click.testing import CliRunner
from peers import needs_accelerate, said

from accel_compat.launch import convert as converting
from accel_compat.launch import parser, request
from accel_compat.launch import workers as launching
from accel_compat.launch.commands import compat
from accel_compat.launch.convert import convert
from accel_compat.settings import settings
from accel_testing.patience import patience

TOLD = """
import contextlib, io, json, os
from accelerate.commands.launch import launch_command_parser, _validate_launch_command
from accelerate.utils import launch
launch.is_fp8_available = lambda: True
before = dict(os.environ)
found = []
for words in %r:
    args = launch_command_parser().parse_args([*words, "x.py"])
    with contextlib.redirect_stderr(io.StringIO()):
        args, _, _ = _validate_launch_command(args)
    args.deepspeed_fields_from_accelerate_config = ""
    if "--use_deepspeed" in words:
        told = launch.prepare_deepspeed_cmd_env(args)[1]
    elif "--cpu" in words or "1" in words[:2]:
        told = launch.prepare_simple_launcher_cmd_env(args)[1]
    else:
        told = launch.prepare_multi_gpu_env(args)
    found.append({name: value for name, value in told.items() if before.get(name) != value})
print(json.dumps(found))
"""
TWO = ("--num_processes", "2", "--main_process_port", "0")
MESH = (*TWO, "--use_fsdp", "--fsdp_version", "2", "--use_parallelism_config")
STARTS = {
    "": ("--num_processes", "1"),
    "deepspeed.": (*TWO, "--use_deepspeed"),
    "fp8_": (*TWO, "--mixed_precision", "fp8"),
    "fsdp_": (*TWO, "--use_fsdp"),
    "megatron_lm_": (*TWO, "--use_megatron_lm"),
    "parallelism_config_": MESH,
    "parallelism_config_cp_": (*MESH, "--parallelism_config_cp_size", "2"),
    "parallelism_config_sp_": (*MESH, "--parallelism_config_sp_size", "2"),
}
"""Start of a setting's name, or of its path -> the flags with which Accelerate hands it on."""
GIVEN = {
    "dynamo_backend": "eager",
    "dynamo_mode": "max-autotune",
    "fp8_backend": "te",
    "fp8_format": "E4M3",
    "fp8_amax_compute_algo": "max",
    "fp8_opt_level": "O1",
    "fp8_override_linear_precision": "true,false,true",
    "fsdp_version": "2",
    "main_process_ip": "127.0.0.1",
    "mixed_precision": "bf16",
    "parallelism_config_cp_backend": "torch",
    "parallelism_config_sp_backend": "deepspeed",
}
"""Values that Accelerate's parser takes; others are made up."""
OTHERWISE = {
    "multi_gpu": "refused with one process",
    "num_machines": "asks for an address too",
    "num_processes": "in each line",
    "main_process_port": "in each line",
    "config_file": "it names other settings",
    "fsdp_ignored_modules": "a key of files only",
    "fp8_fp8_format": "a key of files only",
    "fp8_amax_history_length": "a key of files only",
    "fp8_amax_compute_algorithm": "a key of files only",
    "mpirun_ccl": "a key of files only",
    "mpirun_hostfile": "calls mpirun",
    **{name: "of jobs of SageMaker" for name, each in settings().items() if each.section == "sagemaker"},
    **dict.fromkeys(
        ("compute_environment", "aws_access_key_id", "aws_secret_access_key"), "of SageMaker too"
    ),
    "parallelism_config_cp_size": "stands with the others",
    "parallelism_config_sp_seq_length_is_variable": "Accelerate reads each word as true",
    "parallelism_config_sp_size": "stands with the others",
    "use_parallelism_config": "refused without FSDP, with which it stands above",
    "use_fsdp": "stands above; with one process it is told only by torchrun's launcher",
    "use_deepspeed": "stands above; with one process it is told only by DeepSpeed's launcher",
    "use_megatron_lm": "stands above; with one process it is told only by torchrun's launcher",
}
"""Flags that are not in a line of their own, and why."""
OURS_BESIDES = {
    "ACCELERATE_USE_CPU": "there a launcher of one process tells the first too",
    "OMP_NUM_THREADS": "`accel launch` sets it, to the cores of each process",
    "PYTHONPATH": "`launch` sets it, with the folder of our accelerate",
    "ACCELERATE_CONFIG_DS_FIELDS": "the file is refused before any worker starts",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH": "Accelerate forgets it",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH": "Accelerate forgets it",
    **dict.fromkeys(launching._VISIBLE, "each kind of device reads its own; Accelerate sets one kind's"),
}
"""Variables that may differ, and why."""


UNTOLD = {
    "ACCELERATE_DYNAMO_BACKEND": "no",  # its launcher of DeepSpeed's workers forgets these
    "ACCELERATE_DYNAMO_USE_DYNAMIC": "False",
    "PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION": "sdpa",
}
"""What a variable means that is not set, where the table of settings does not say it."""


def flag(setting):
    """A setting's flag, with a value that is not its default."""
    usual = setting.default in ("true", True)
    words = {"int": "3", "float": "0.25"}.get(setting.kind, "false" if usual else "true")
    value = [] if setting.kind == "switch" else [GIVEN.get(setting.name, words)]
    return [f"--{setting.name}", *value]


def lines():
    for setting in settings().values():
        if not setting.reason and setting.name not in OTHERWISE:
            place = f"{setting.section}." if setting.section == "deepspeed" else setting.name
            start = next(each for each in reversed(STARTS) if place.startswith(each))
            yield [*STARTS[start], *flag(setting)]


def unlike(theirs, ours):
    """The variables that differ; defaults of the config classes and the spelling of truths do not count."""
    usual = {setting.variable: str(setting.unset) for setting in settings().values()} | UNTOLD
    names = (theirs.keys() | ours.keys()) - OURS_BESIDES.keys()
    pairs = {name: (theirs.get(name, usual.get(name)), ours.get(name, usual.get(name))) for name in names}
    truths = {"1": "true", "0": "false"}
    told = {name: [truths.get(str(each), str(each)).lower() for each in pair] for name, pair in pairs.items()}
    return {name: pair for name, pair in told.items() if pair[0] != pair[1]}


@needs_accelerate
def test_each_flag_tells_workers_what_it_tells_them_there(tmp_path, monkeypatch, run_processes):
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
        monkeypatch.delenv(name)  # of tests before
    every = [*map(list, STARTS.values()), *lines()]
    for words, theirs in zip(
        every,
        said(run_processes, TOLD % every, ours=False, environment={"HF_HOME": str(tmp_path)}),
        strict=True,
    ):
        told = launching.environment(request.parse([*words, "x.py"], None).settings)
        assert unlike(theirs, told) == {}, words


def test_a_strategy_that_is_not_chosen_tells_workers_nothing(capsys):
    told = launching.environment({"fsdp_version": "2", "megatron_lm_tp_degree": 2, "zero_stage": 3})
    assert [name for name in told if "FSDP" in name or "MEGATRON" in name or "ZERO" in name] == []
    assert "fsdp_version has no effect without --use_fsdp" in capsys.readouterr().err


def test_each_flag_is_explained():
    silent = [
        action.dest for action in parser.launch_parser()._actions if action.option_strings and not action.help
    ]
    assert silent == ["tpu_use_cluster"]  # its opposite has the text


def test_a_wrong_flag_is_answered_in_two_lines(capsys):
    with pytest.raises(SystemExit):
        request.parse(["--num_proceses", "2", "x.py"], None)
    said_ = capsys.readouterr().err
    assert "did you mean --num_processes" in said_
    assert len(said_.splitlines()) == 2


@pytest.mark.parametrize("module", ["launch", "accelerate_cli launch"])
@pytest.mark.by_default
def test_a_command_runs_as_a_module(tmp_path, module, run_command):
    script = tmp_path / "t.py"
    script.write_text("print('TRAINED')")
    name, *more = module.split()
    words = ["-m", f"accelerate.commands.{name}", *more, "--cpu", "--num_processes", "1", str(script)]
    done = run_command(
        [sys.executable, *words],
        env={**os.environ, "ACCEL_COMPAT": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "TRAINED" in done.stdout, done.stderr


def imported(tmp_path, **config):
    file = tmp_path / "theirs.yaml"
    file.write_text(yaml.safe_dump(config))
    return CliRunner().invoke(compat, ["import", str(file), "-o", str(tmp_path / "accel.yaml")])


def test_what_is_imported_passes_the_check(tmp_path, monkeypatch, run_command):
    monkeypatch.setattr(converting, "plugin_status", lambda name: "missing")
    done = imported(tmp_path, distributed_type="MULTI_CPU", mixed_precision="fp8", num_processes=2)
    assert done.exit_code == 0, done.output
    made = yaml.safe_load((tmp_path / "accel.yaml").read_text())
    assert made == {"launch": {"processes_per_node": 2}}


def test_names_between_commas_become_a_list():
    done = convert({"use_fsdp": True, "fsdp_transformer_layer_cls_to_wrap": "GPT2Block,Other"})
    assert done.config["fsdp"]["transformer_cls_names_to_wrap"] == ["GPT2Block", "Other"]


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"max_restarts": "x"}, "max_restarts is 'x', not a number"),
        ({"num_machines": 0}, "num_machines is 0"),
    ],
)
def test_what_the_check_refuses_is_not_written(tmp_path, setting, named):
    done = imported(tmp_path, distributed_type="MULTI_CPU", num_processes=1, **setting)
    assert done.exit_code == 1
    assert named in f"{done.output}{done.exception}"
    assert not (tmp_path / "accel.yaml").exists()


def test_options_of_a_recipe_have_no_place_in_our_file():
    assert "Float8Config" in convert({"fp8_pad_inner_dim": True}).dropped["fp8_pad_inner_dim"]


@pytest.mark.parametrize("status", ["available", "missing"])
def test_processes_stay_bound_to_their_cpus(monkeypatch, status):
    monkeypatch.setattr(converting, "plugin_status", {"cuda": status}.get)
    done = convert({"enable_cpu_affinity": True})
    if status == "missing":
        assert "accel-cuda" in done.dropped["enable_cpu_affinity"]
    assert done.config == ({"cuda": {"numa_affinity": True}} if status == "available" else {})


def test_workers_end_when_the_launcher_is_told_to(tmp_path, start_command):
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import os, pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(pathlib.Path('told').touch()))\n"
        "pathlib.Path('up').touch()\n"
        "time.sleep(60)\n"
    )
    words = ["-c", "from accel_compat.launch.commands import accelerate; accelerate('launch')"]
    with start_command([sys.executable, *words, "--cpu", str(worker)], cwd=tmp_path) as launcher:
        ends = time.monotonic() + patience(50)
        while not (tmp_path / "up").exists() and time.monotonic() < ends:
            time.sleep(0.1)
        launcher.terminate()
        assert launcher.wait(patience(40)) == 128 + signal.SIGTERM
    assert (tmp_path / "told").exists()

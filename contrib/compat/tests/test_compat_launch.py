"""`accelerate launch`: what workers are told, what its flags say, and how it is called as a module."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from peers import needs_accelerate, said

from accel_compat.launch import convert as converting
from accel_compat.launch import parser, request
from accel_compat.launch import workers as launching
from accel_compat.launch.commands import compat
from accel_compat.launch.convert import convert
from accel_compat.launch.shim import write_shim

TOLD = """
import json, os
from accelerate.commands.launch import launch_command_parser, _validate_launch_command
from accelerate.utils.launch import prepare_multi_gpu_env
before = dict(os.environ)
found = []
for words in %r:
    words = ["--num_processes", "2", "--main_process_port", "0", *words, "x.py"]
    args = launch_command_parser().parse_args(words)
    args, _, _ = _validate_launch_command(args)
    told = prepare_multi_gpu_env(args)
    ours = "ACCELERATE_", "FSDP_", "PARALLELISM_"
    found.append({name: told[name] for name in told if name.startswith(ours)})
print(json.dumps(found))
"""
LINES = [
    [],
    ["--mixed_precision", "bf16"],
    ["--use_fsdp"],
    ["--use_fsdp", "--fsdp_version", "2", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"],
    ["--use_fsdp", "--fsdp_sync_module_states", "false", "--fsdp_cpu_ram_efficient_loading", "false"],
    ["--dynamo_backend", "eager", "--dynamo_use_dynamic"],
    ["--gradient_accumulation_steps", "4"],
    ["--enable_cpu_affinity"],
]
LESS = {"ACCELERATE_USE_CPU", "ACCEL__CUDA__NUMA_AFFINITY"}
"""What ours tells besides: there a launcher of one process tells the first too."""


@needs_accelerate
def test_workers_are_told_what_they_are_there(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
        monkeypatch.delenv(name)  # of tests before
    away = {"HF_HOME": str(tmp_path)}
    for words, theirs in zip(LINES, said(TOLD % LINES, ours=False, environment=away), strict=True):
        told = launching.environment(request.parse([*words, "x.py"], None).settings)
        assert {name: each for name, each in told.items() if name not in LESS} == theirs, words


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
def test_a_command_runs_as_a_module(tmp_path, module):
    write_shim(tmp_path / "shim")
    script = tmp_path / "t.py"
    script.write_text("print('TRAINED')")
    name, *more = module.split()
    words = ["-m", f"accelerate.commands.{name}", *more, "--cpu", "--num_processes", "1", str(script)]
    done = subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "shim")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "TRAINED" in done.stdout, done.stderr


def test_the_metadata_says_whose_accelerate_it_is(tmp_path):
    write_shim(tmp_path)
    (file,) = Path(tmp_path).glob("*.dist-info/METADATA")
    assert "\nHome-page: https://github.com/huggingface/accelerate\n" in file.read_text()


def imported(tmp_path, **config):
    file = tmp_path / "theirs.yaml"
    file.write_text(yaml.safe_dump(config))
    return CliRunner().invoke(compat, ["import", str(file), "-o", str(tmp_path / "accel.yaml")])


def test_what_is_imported_passes_the_check(tmp_path):
    done = imported(tmp_path, distributed_type="MULTI_CPU", mixed_precision="fp8", num_processes=2)
    assert done.exit_code == 0, done.output
    made = yaml.safe_load((tmp_path / "accel.yaml").read_text())
    assert made == {"launch": {"processes_per_node": 2}}


def test_names_between_commas_become_a_list():
    done = convert({"use_fsdp": True, "fsdp_transformer_layer_cls_to_wrap": "GPT2Block,Other"})
    assert done.config["fsdp"]["transformer_cls_names_to_wrap"] == ["GPT2Block", "Other"]


@pytest.mark.parametrize(
    ("setting", "named"),
    [({"max_restarts": "x"}, "launch.max_restarts"), ({"num_machines": 0}, "num_machines is 0")],
)
def test_what_the_check_refuses_is_not_written(tmp_path, setting, named):
    done = imported(tmp_path, distributed_type="MULTI_CPU", num_processes=1, **setting)
    assert done.exit_code == 1
    assert named in f"{done.output}{done.exception}"
    assert not (tmp_path / "accel.yaml").exists()


@pytest.mark.parametrize("status", ["available", "missing"])
def test_processes_stay_bound_to_their_cpus(monkeypatch, status):
    monkeypatch.setattr(converting, "plugin_status", {"cuda": status}.get)
    done = convert({"enable_cpu_affinity": True})
    if status == "missing":
        assert "accel-cuda" in done.dropped["enable_cpu_affinity"]
    assert done.config == ({"cuda": {"numa_affinity": True}} if status == "available" else {})

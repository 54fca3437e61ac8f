"""`accel config`, run as people run it."""

from __future__ import annotations

import json
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from config_toys import TEN_MISTAKES

NEEDS = "device: far-away\nmixed_precision: bf16\n"

asks_torch = pytest.mark.skipif(find_spec("torch") is None, reason="only torch knows these words")


@pytest.fixture
def accel(tmp_path, run_command):
    """Run `accel config ...` in an empty folder, with a device plugin that this machine cannot use."""
    info = tmp_path / "site" / "toy_far_away-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-far-away\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(
        "[accel_core.device]\nfar-away = toy_far_away:CARD\n"
        "[accel_core.strategy]\nsharder = toy_far_away:SHARDER\n"
    )
    (tmp_path / "site" / "toy_far_away.py").write_text(
        "from accel_core import Card\n"
        "def probe(): return 'no driver'\n"
        "CARD = Card(name='far-away', slot='device', summary='x', api_version='1.0', probe=probe,"
        " config='config_toys:ShardConfig')\n"
        "SHARDER = Card(name='sharder', slot='strategy', summary='x', api_version='1.0', priority=None,"
        " config='config_toys:ShardConfig')\n"
    )
    paths = [str(tmp_path / "site"), str(Path(__file__).parent)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ACCEL")}

    def call(*arguments, answers="", torch=True, **variables):
        hidden = "" if torch else "import sys; sys.modules['torch'] = None; "
        return run_command(
            [sys.executable, "-c", f"{hidden}from accel_core.cli import main; main()", "config", *arguments],
            cwd=tmp_path,
            env=environment | {"PYTHONPATH": os.pathsep.join(paths)} | variables,
            input=answers,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    call.folder = tmp_path
    return call


def test_check_prints_a_line_for_each_of_ten_mistakes(accel):
    (accel.folder / "accel.yaml").write_text(TEN_MISTAKES.replace("shard:", "far-away:"))
    done = accel("check")
    assert done.returncode == 1
    assert len(done.stdout.splitlines()) == 10
    assert done.stderr == ""


def test_check_on_a_machine_without_the_device_succeeds(accel):
    (accel.folder / "accel.yaml").write_text(NEEDS)
    done = accel("check")
    assert done.stdout.splitlines() == ["accel.yaml: no mistakes"]
    assert done.returncode == 0


def test_check_finds_names_of_plugins_nobody_has(accel):
    (accel.folder / "accel.yaml").write_text(
        "strategy: singel\nmixed_precision: single\nlog_with: [abacus]\n"
    )
    *lines, last = accel("check").stdout.splitlines()
    assert lines == [
        "accel.yaml:1:1: strategy: no strategy 'singel' is installed; did you mean 'single'?",
        "accel.yaml:2:1: mixed_precision: no precision 'single' is installed; single is a strategy",
    ]
    assert last.startswith("accel.yaml:3:1: log_with: no tracker 'abacus' is installed; installed: ")


@pytest.mark.parametrize("key", ["log_with", "strategy", "device", "mixed_precision"])
def test_a_line_quotes_at_most_200_characters_of_a_name(accel, key):
    (accel.folder / "accel.yaml").write_text(f"{key}: {'x' * 3000}\n")
    (line,) = accel("check").stdout.splitlines()
    assert line.startswith(f"accel.yaml:1:1: {key}: ")
    assert 200 < len(line) < 500


def test_check_as_json(accel):
    (accel.folder / "other.yaml").write_text("strategi: x\n")
    done = accel("check", "--config", "other.yaml", "--json")
    assert json.loads(done.stdout) == {
        "file": "other.yaml",
        "problems": ["other.yaml:1:1: strategi: unknown key; did you mean 'strategies'?"],
        "notes": [],
    }


def test_show_prints_each_value_and_its_origin(accel):
    (accel.folder / "accel.yaml").write_text(NEEDS)
    lines = accel(
        "show", ACCEL__GRAD_SCALER__INIT_SCALE="2", ACCEL__MIXED_PRECISION="fp16"
    ).stdout.splitlines()
    assert lines[0] == "file: accel.yaml"
    rows = {line.split()[0]: line.split(maxsplit=2)[1:] for line in lines[1:]}
    assert rows["device"] == ['"far-away"', "accel.yaml:1:1"]
    assert rows["grad_scaler.init_scale"] == ["2.0", "variable ACCEL__GRAD_SCALER__INIT_SCALE"]
    assert rows["launch.nodes"] == ["1", "default"]


def test_show_says_which_sections_are_valid_and_unused(accel):
    (accel.folder / "accel.yaml").write_text("far-away: {stage: 3}\ndevice: cpu\n")
    shown = json.loads(accel("show", "--json").stdout)
    values = {row["path"]: row for row in shown["values"]}
    assert values["far-away.stage"] == {"path": "far-away.stage", "value": 3, "origin": "accel.yaml:1:12"}
    (note,) = shown["notes"]
    assert note.startswith("accel.yaml:1:12: device far-away is not in this config: its options do nothing;")
    assert note.endswith("`device: far-away` chooses it")


def test_check_says_that_a_run_refuses_variables_of_a_plugin_which_it_has_not(accel):
    done = accel("check", ACCEL__FAR_AWAY__STAGE="3")
    about = "variable ACCEL__FAR_AWAY__STAGE: device far-away is not in this config"
    assert f"{about}: a run refuses its options; `device: far-away` chooses it" in done.stdout


def test_show_of_a_faulty_file_is_an_error_that_names_the_remedy(accel):
    (accel.folder / "accel.yaml").write_text("- list\n")
    done = accel("show")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "correct this; `accel config check` looks again without training"
    assert "Traceback" not in done.stderr


def test_the_schema_accepts_what_the_reader_accepts(accel):
    whole = json.loads(accel("schema").stdout)
    shard = whole["properties"]["far-away"]["properties"]
    assert whole["properties"]["launch"]["properties"]["processes_per_node"]["anyOf"] == [
        {"type": "integer"},
        {"enum": ["auto"]},
    ]
    assert shard["stage"] == {
        "type": "integer",
        "description": "What is sharded.",
        "enum": [1, 2, 3],
        "default": 2,
    }
    assert shard["patience"] == {
        "anyOf": [{"type": "number"}, {"type": "null"}],
        "description": "How long to wait. Unit: s.",
        "default": None,
    }
    assert shard["policy"]["properties"]["param_dtype"]["enum"] == ["fp32", "bf16"]
    assert not {"wrap", "dtype"} & shard.keys()
    assert "plugins" not in whole["properties"]


def test_the_schema_of_one_section(accel):
    assert json.loads(accel("schema", "grad_scaler").stdout)["title"] == "GradScalerKwargs"
    done = accel("schema", "grad_scalr")
    assert (done.returncode, "did you mean 'grad_scaler'?" in done.stderr) == (1, True)


def test_init_with_defaults_writes_a_commented_file_that_pins_nothing(accel):
    assert accel("init", "--defaults").returncode == 0
    text = (accel.folder / "accel.yaml").read_text()
    assert "# Device plugin, or torch device type. auto: the best here.\n# device: auto\n" in text
    assert yaml.safe_load(text) == {"launch": None, "project": None}
    assert accel("check").returncode == 0
    values = json.loads(accel("show", "--json").stdout)["values"]
    assert {row["path"]: row["value"] for row in values}["mixed_precision"] == "no"


@asks_torch
def test_init_asks_again_after_an_answer_that_cannot_be_and_writes_what_differs(accel):
    answers = "gpu\n\nfdsp\nsingle\nbf61\nbf16\n0\nmany\n4\n\n2\nhost:29500\nout\n"
    done = accel("init", answers=answers)
    for word in ("gpu", "fdsp", "bf61"):
        assert f"Error: '{word}' is not one of " in done.stdout
    assert "must be at least 1, got 0" in done.stdout
    assert "expected integer, got 'many'" in done.stdout
    assert yaml.safe_load((accel.folder / "accel.yaml").read_text()) == {
        "strategy": "single",
        "mixed_precision": "bf16",
        "gradient_accumulation_steps": 4,
        "launch": {"nodes": 2, "rendezvous": "host:29500"},
        "project": {"project_dir": "out"},
    }


def test_init_says_which_devices_it_found_and_what_can_be_answered(accel):
    done = accel("init", answers="\n" * 9)
    assert done.stdout.startswith("This machine: ")
    assert re.search(r"One of: auto, cpu, .*far-away", done.stdout)
    assert re.search(r"One of: no, .*bf16", done.stdout)


def test_init_asks_for_no_option_that_is_refused_whatever_the_answer(accel):
    done = accel("init", answers="\nsharder\n\n\n\n\n\ny\n" + "\n" * 9)
    assert "sharder.stage" in done.stdout, done.stderr
    assert "sharder.level" not in done.stdout
    (accel.folder / "accel.yaml").write_text("strategy: sharder\nsharder: {level: 1}\n")
    assert "accel.yaml:2:11: sharder.level: levels are stages here; use stage" in accel("check").stdout


def test_init_overwrites_nothing_unless_forced(accel):
    (accel.folder / "accel.yaml").write_text("device: cpu\n")
    done = accel("init", "--defaults")
    assert (done.returncode, "use --force" in done.stderr) == (1, True)
    assert accel("init", "--defaults", "--force").returncode == 0


def test_no_command_imports_torch(accel):
    done = accel("show", PYTHONPROFILEIMPORTTIME="1")
    assert done.returncode == 0
    assert not [line for line in done.stderr.splitlines() if line.rpartition("|")[2].strip() == "torch"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        pytest.param(
            "device: gpu\n",
            "accel.yaml:1:1: device: 'gpu' is neither .*; write cuda, or auto",
            marks=asks_torch,
        ),
        pytest.param(
            "device: fat-away\n", "device: 'fat-away' .*; did you mean 'far-away'", marks=asks_torch
        ),
        ("launch: {node_rank: 4}\n", "accel.yaml:1:10: launch: node_rank is 4, but the ranks of 1 node"),
        ("launch: {nodes: 2, node_rank: 2}\n", "node_rank is 2, but the ranks of 2 node.* are 0 to 1"),
        ("mixed_precision: BF16\n", "did you mean 'bf16'"),
        ("MIXED_PRECISION: bf16\n", "unknown key; did you mean 'mixed_precision'"),
        (
            "strategies: {big: {cpu_offloa: 1, plugin: singel}}\n",
            "accel.yaml:1:35: strategies.big.plugin: no strategy 'singel' .*did you mean 'single'",
        ),
    ],
)
def test_check_finds_what_no_machine_can_run(accel, text, problem):
    (accel.folder / "accel.yaml").write_text(text)
    done = accel("check")
    assert done.returncode == 1
    assert re.search(problem, done.stdout), done.stdout


def test_without_torch_init_asks_and_says_that_only_workers_know_their_devices(accel):
    done = accel("init", answers="\n" * 9, torch=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("This machine: torch is not installed here, so only the workers know")


def test_a_bare_no_is_the_word_where_no_is_one(accel):
    (accel.folder / "accel.yaml").write_text("mixed_precision: no\n")
    assert accel("check").returncode == 0


def test_a_variable_with_one_underscore_too_few_is_an_error_with_the_right_one(accel):
    done = accel("check", ACCEL_MIXED_PRECISION="bf16", ACCEL_LAUNCH_NODES="2", ACCEL_RUN_ID="x")
    assert done.stdout.splitlines() == [
        "variable ACCEL_LAUNCH_NODES: is never read; did you mean ACCEL__LAUNCH__NODES?",
        "variable ACCEL_MIXED_PRECISION: is never read; did you mean ACCEL__MIXED_PRECISION?",
    ]


@pytest.mark.parametrize("rest", ["LAUNCH__PROCESSES_PER_NODE", "SOME_PLUGIN__OPTION"])
def test_a_variable_of_a_section_with_one_underscore_at_its_start_is_an_error(accel, rest):
    done = accel("check", **{f"ACCEL_{rest}": "2"})
    assert done.stdout.splitlines() == [
        f"variable ACCEL_{rest}: is never read; did you mean ACCEL__{rest}?",
    ]


def test_a_misspelt_command_is_answered_with_the_one_that_was_meant(accel):
    assert "No such command 'chekc'; did you mean 'check'?" in accel("chekc").stderr


def test_check_names_an_option_that_does_nothing_without_another(accel):
    (accel.folder / "accel.yaml").write_text("compile: {mode: default}\n")
    assert "compile.mode (accel.yaml:1:11) does nothing here" in accel("check").stdout

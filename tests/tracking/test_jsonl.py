"""The JSONL tracker: a line for each start and each log, readable at any moment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from accel_core import Accelerator, ConfigError, ProjectConfiguration
from accel_core.defaults.lines import LineFile


@pytest.fixture
def lines(tmp_path):
    def write(*logged, config=None, project="project"):
        accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=tmp_path)
        accelerator.init_trackers(project, config)
        for step, values in enumerate(logged):
            accelerator.log(values, step=step)
        accelerator.end_training()
        text = (tmp_path / f"{project}.jsonl").read_text()
        return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]

    return write


def test_a_line_for_the_start_and_one_for_each_log(lines):
    start, first, second = lines({"loss": 1.5}, {"loss": 0.5}, config={"lr": 0.1})

    assert start["project"] == "project"
    assert start["config"] == {"lr": 0.1}
    assert start["run"]
    assert [(line["step"], line["values"]) for line in (first, second)] == [
        (0, {"loss": 1.5}),
        (1, {"loss": 0.5}),
    ]
    assert start["time"] <= first["time"] <= second["time"]


def test_numbers_that_json_has_not_are_words(lines):
    _, line = lines({"a": float("nan"), "b": [float("inf")], "c": torch.tensor(-float("inf"))})

    assert line["values"] == {"a": "NaN", "b": ["Infinity"], "c": "-Infinity"}
    assert float(line["values"]["c"]) == -float("inf")


def test_anything_can_be_logged(lines):
    values = {
        "tensor": torch.tensor([1.5, 2.5], dtype=torch.bfloat16, requires_grad=True),
        "array": np.ones((1, 2), dtype=np.float16),
        "number": np.int64(7),
        "nested": {1: {"x": None, "y": True}},
        "path": Path("a/b"),
        "text": "ä\nb",
    }
    _, line = lines(values)

    assert line["values"] == {
        "tensor": [1.5, 2.5],
        "array": [[1.0, 1.0]],
        "number": 7,
        "nested": {"1": {"x": None, "y": True}},
        "path": "a/b",
        "text": "ä\nb",
    }


def test_numbers_longer_than_pythons_are_text(lines):
    _, line = lines({"long": np.longdouble(1) / 4, "complex": np.clongdouble(1j), "several": np.ones(2, "g")})

    assert line["values"] == {"long": "0.25", "complex": "1j", "several": ["1.0", "1.0"]}


def test_a_tensor_without_a_list_is_text(lines):
    _, line = lines({"sparse": torch.eye(2).to_sparse(), "meta": torch.empty(2, device="meta"), "loss": 1})

    assert line["values"]["sparse"].startswith("tensor(indices=")
    assert line["values"]["meta"].startswith("tensor(...")
    assert line["values"]["loss"] == 1


def test_what_numpy_has_masked_is_no_number(lines):
    several = np.ma.masked_equal([1, 2], 2)
    _, line = lines({"one": several[1], "several": several})

    assert line["values"] == {"one": None, "several": [1, None]}


def test_a_resumed_run_appends(lines):
    assert len(lines({"x": 1})) == 2
    assert [line.get("values") for line in lines({"x": 2})] == [None, {"x": 1}, None, {"x": 2}]


def test_the_configuration_stands_under_the_id_that_load_state_gives(tmp_path):
    for rate in (0.1, 0.2):
        accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=tmp_path)
        accelerator.init_trackers("project", {"lr": rate})
        accelerator.load_state(tmp_path / "saved", missing_ok=True)
        accelerator.log({"loss": 1})
        accelerator.save_state(tmp_path / "saved")
        accelerator.end_training()
    told = [json.loads(line) for line in (tmp_path / "project.jsonl").read_text().splitlines()]

    resumed = [line for line in told if line["run"] == told[-1]["run"]]
    assert [line["config"]["lr"] for line in resumed if "config" in line] == [0.1, 0.2]


def test_lines_of_two_runs_at_once_can_be_told_apart(tmp_path):
    both = [Accelerator(cpu=True, log_with="jsonl", project_dir=tmp_path) for _ in range(2)]
    for accelerator in both:
        accelerator.init_trackers("project")
    for accelerator, value in zip(both * 2, range(4), strict=True):
        accelerator.log({"x": value}, step=0)
    for accelerator in both:
        accelerator.end_training()
    lines = [json.loads(line) for line in (tmp_path / "project.jsonl").read_text().splitlines()]
    found = {
        run: [line["values"]["x"] for line in lines if line["run"] == run and "values" in line]
        for run in {line["run"] for line in lines}
    }

    assert sorted(found.values()) == [[0, 2], [1, 3]]


def test_a_torn_last_line_spoils_no_other(lines, tmp_path):
    (tmp_path / "project.jsonl").write_text('{"step": 1, "val')
    with pytest.raises(json.JSONDecodeError):
        lines({"x": 1})
    torn, *rest = (tmp_path / "project.jsonl").read_text().splitlines()

    assert torn == '{"step": 1, "val'
    assert [json.loads(line).get("values") for line in rest] == [None, {"x": 1}]


KILLED = """
import sys
from accel_core import Accelerator
accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=sys.argv[1])
accelerator.init_trackers("project")
step = 0
while True:
    accelerator.log({"text": "x" * 5000}, step=step)
    step += 1
    if step == 20:
        print("now", flush=True)
"""


def test_a_kill_cuts_the_last_line_at_most(tmp_path, start_command):
    with start_command([sys.executable, "-c", KILLED, tmp_path], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        os.kill(process.pid, signal.SIGKILL)
    *lines, last = (tmp_path / "project.jsonl").read_text().split("\n")

    assert len([json.loads(line) for line in lines]) > 20
    assert not last or last.startswith('{"time": ')


def log_twice(accelerator):
    accelerator.log({"x": 1})
    accelerator.log({"x": 2})


def test_settings_that_a_full_disk_kept_back_come_with_the_next_values(tmp_path, monkeypatch):
    project = ProjectConfiguration(project_dir=str(tmp_path))
    accelerator = Accelerator(cpu=True, log_with="jsonl", project_config=project)
    accelerator.init_trackers("project", {"lr": 0.1})
    monkeypatch.setattr(accelerator.run, "run_id", "another")

    def write(number, content):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("accel_core.defaults.lines.os.write", write)
        with pytest.warns(UserWarning, match="tracker jsonl loses values"):
            accelerator.log({"loss": 1})
    accelerator.log({"loss": 2})
    accelerator.end_training()

    told = [json.loads(line) for line in (tmp_path / "project.jsonl").read_text().splitlines()]
    assert {"lr": 0.1} in [line.get("config") for line in told if line["run"] == "another"]


@pytest.mark.parametrize("written", [None, 3])
def test_a_full_disk_costs_values_and_a_warning_but_not_the_training(tmp_path, monkeypatch, written):
    project = ProjectConfiguration(project_dir=str(tmp_path))
    accelerator = Accelerator(cpu=True, log_with="jsonl", project_config=project)
    accelerator.init_trackers("project")

    def write(number, content):
        if written is None:
            raise OSError(28, "No space left on device")
        return written

    with monkeypatch.context() as patched:
        patched.setattr("accel_core.defaults.lines.os.write", write)
        with pytest.warns(UserWarning, match="tracker jsonl loses values") as told:
            log_twice(accelerator)

    (said,) = [str(one.message) for one in told if "tracker jsonl" in str(one.message)]
    assert said.startswith("tracker jsonl loses values, and training goes on")


def test_a_file_that_cannot_be_begun_is_named_with_the_remedy(tmp_path):
    (tmp_path / "project.jsonl").symlink_to("/dev/full")
    accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"jsonl cannot write .*project.jsonl: OSError: .* No space left"):
        accelerator.init_trackers("project")
    with pytest.raises(ConfigError, match="File name too long.*\nmake room there, or give another"):
        accelerator.init_trackers("x" * 300)

    accelerator.init_trackers("other")


def test_a_project_may_lie_in_a_folder(lines):
    assert len(lines({"x": 1}, project="group/one")) == 2


def test_logs_have_a_folder_of_their_own_if_asked(tmp_path):
    from accel_core import ProjectConfiguration

    where = ProjectConfiguration(project_dir=tmp_path, logging_dir=tmp_path / "logs")
    accelerator = Accelerator(cpu=True, log_with="jsonl", project_config=where)
    accelerator.init_trackers("project")
    accelerator.end_training()

    assert (tmp_path / "logs" / "project.jsonl").exists()


def test_options_it_does_not_have_are_an_error(tmp_path):
    accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=tmp_path)
    with pytest.raises(ConfigError, match="init_kwargs: tracker jsonl has no options, but was given dir"):
        accelerator.init_trackers("project", init_kwargs={"jsonl": {"dir": 1}})
    accelerator.end_training()


def test_a_closed_file_writes_into_no_other_file_that_has_its_number(tmp_path):
    lines = LineFile(tmp_path / "lines.jsonl")
    lines.close()
    with (tmp_path / "other").open("wb") as other:
        assert other.fileno() == lines.fileno()
        with pytest.raises(ValueError, match="is closed"):
            lines.write(loss=1.0)

    assert not (tmp_path / "other").read_bytes()

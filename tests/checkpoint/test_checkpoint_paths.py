"""Paths as users write them: URLs are refused by name, `~` is the home folder, a slash at the end is fine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from accel_core import Accelerator, CheckpointContents, ProjectConfiguration
from accel_core.checkpoint import file
from accel_core.errors import CheckpointError

URLS = [
    "gs://bucket/ck",
    "s3://bucket/ck",
    "hf://me/ck",
    "memory://ck",
    "file:///tmp/ck",
    "abfss+x://a/b",
    Path("s3://b/c"),
]


@pytest.fixture
def accelerator(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    made = Accelerator(cpu=True)
    made.model = made.prepare(nn.Linear(2, 2))
    yield made
    made.end_training()


CALLS = {
    "save_state": lambda accelerator, path: accelerator.save_state(path),
    "load_state": lambda accelerator, path: accelerator.load_state(path, missing_ok=True),
    "save_model": lambda accelerator, path: accelerator.save_model(accelerator.model, path),
    "save": lambda accelerator, path: accelerator.save({}, path),
    "load": lambda accelerator, path: file.load(path),
    "contents": lambda accelerator, path: CheckpointContents.read(path),
}


@pytest.mark.parametrize("url", URLS, ids=str)
@pytest.mark.parametrize("call", CALLS)
def test_a_url_is_refused_by_name(accelerator, tmp_path, monkeypatch, url, call):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"is a URL, and checkpoints and weights are .* local"):
        CALLS[call](accelerator, url)
    assert list(tmp_path.iterdir()) == []


def test_a_url_as_the_projects_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    project = ProjectConfiguration(project_dir="gs://bucket/run", automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    for call in (accelerator.save_state, accelerator.load_state):
        with pytest.raises(CheckpointError, match="gs://bucket/run is a URL"):
            call()
    assert list(tmp_path.iterdir()) == []
    accelerator.end_training()


def test_home_is_expanded_everywhere(accelerator, tmp_path):
    accelerator.save_state("~/state/")
    accelerator.load_state("~/state/")
    accelerator.save_model(accelerator.model, "~/weights/")
    accelerator.save({"a": torch.ones(1)}, "~/object")
    assert file.load("~/object").keys() == {"a"}
    contents = CheckpointContents.read("~/state")
    contents.write("~/copy/")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "object", "state", "weights"]


def test_home_is_expanded_in_the_projects_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    project = ProjectConfiguration(project_dir="~/runs", automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    assert accelerator.logging_dir == str(tmp_path / "runs")
    assert accelerator.save_state() == tmp_path / "runs" / "checkpoints" / "checkpoint_0"
    accelerator.end_training()


def test_the_working_folder_is_not_replaced(accelerator, tmp_path, monkeypatch):
    accelerator.save_state(tmp_path / "ck")
    monkeypatch.chdir(tmp_path / "ck")
    for path in (".", "", tmp_path / "ck"):
        with pytest.raises(CheckpointError, match=r"working folder.*\nsave to a folder in it"):
            accelerator.save_state(path)
    accelerator.load_state(".")
    assert accelerator.save_state("best") == tmp_path / "ck" / "best"


def test_a_name_too_long_for_the_disk_is_an_error_with_a_remedy(accelerator, tmp_path):
    with pytest.raises(CheckpointError, match=r"cannot be saved: .*too long.*\nsave to a"):
        accelerator.save_state(tmp_path / ("n" * 250))

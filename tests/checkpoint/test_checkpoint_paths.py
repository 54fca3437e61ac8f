"""Paths as users write them: URLs need a plugin, `~` is the home folder, a slash at the end is fine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from accel_core import Accelerator, ProjectConfiguration, storage_at
from accel_core.checkpoint import file
from accel_core.checkpoint.places import store_for
from accel_core.errors import CheckpointError
from accel_core.plugins import discovery
from accel_core.plugins.discovery import Discovery

URLS = ["s3://bucket/ck", "nowhere://ck", "file:///tmp/ck", "abfss+x://a/b", Path("s3://b/c")]


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
    "storage_at": lambda accelerator, path: storage_at(path),
}
FILES = {
    "save": lambda accelerator, path: accelerator.save({}, path),
    "load": lambda accelerator, path: file.load(path),
}


@pytest.fixture
def no_stores(monkeypatch):
    """As where no plugin of the slot `store` is installed."""
    monkeypatch.setattr(discovery, "discover", lambda: Discovery(()))
    store_for.cache_clear()
    yield
    store_for.cache_clear()


@pytest.mark.usefixtures("no_stores")
@pytest.mark.parametrize("url", URLS, ids=str)
@pytest.mark.parametrize("call", CALLS)
def test_a_url_that_no_plugin_serves_is_refused_by_name(accelerator, tmp_path, monkeypatch, url, call):
    monkeypatch.chdir(tmp_path)
    scheme = str(url).partition(":")[0]
    remedy = "pip install ./contrib/stores" if scheme == "s3" else "give a folder on a disk"
    with pytest.raises(
        CheckpointError, match=rf"(?s)no plugin here .* {re.escape(scheme)}: URLs\n.*{remedy}"
    ):
        CALLS[call](accelerator, url)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", FILES)
def test_single_files_are_local_ones(accelerator, call):
    with pytest.raises(CheckpointError, match=r"is a URL, and this is .* local"):
        FILES[call](accelerator, "s3://bucket/file")


@pytest.mark.parametrize("path", [b"here", 3, None, "", "a\0b"], ids=repr)
@pytest.mark.parametrize("call", [*CALLS, *FILES])
def test_what_is_not_a_path_is_refused(accelerator, call, path):
    if path is not None or call in FILES:
        with pytest.raises(CheckpointError, match="is not a path\ngive text"):
            (CALLS | FILES)[call](accelerator, path)


def test_a_url_with_a_password_is_refused_and_not_repeated(accelerator):
    with pytest.raises(CheckpointError, match="with a password in it") as refused:
        accelerator.save_state("s3://me:secret@bucket/ck")
    assert "secret" not in str(refused.value)


@pytest.mark.usefixtures("no_stores")
def test_a_url_as_the_projects_folder_needs_a_plugin_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    project = ProjectConfiguration(project_dir="gs://bucket/run", automatic_checkpoint_naming=True)
    with pytest.raises(CheckpointError, match="reads and writes gs: URLs"):
        Accelerator(cpu=True, project_config=project)
    assert list(tmp_path.iterdir()) == []


def test_home_is_expanded_everywhere(accelerator, tmp_path):
    accelerator.save_state("~/state/")
    accelerator.load_state("~/state/")
    accelerator.save_model(accelerator.model, "~/weights/")
    accelerator.save({"a": torch.ones(1)}, "~/object")
    assert file.load("~/object").keys() == {"a"}
    assert str(storage_at("~/state")) == str(tmp_path / "state")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["object", "state", "weights"]


def test_home_is_expanded_in_the_projects_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    project = ProjectConfiguration(project_dir="~/runs", automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    assert accelerator.logging_dir == str(tmp_path / "runs")
    assert accelerator.save_state() == tmp_path / "runs" / "checkpoints" / "checkpoint_0"
    accelerator.end_training()


def test_the_working_folder_may_be_the_checkpoint(accelerator, tmp_path, monkeypatch):
    accelerator.save_state(tmp_path / "ck")
    monkeypatch.chdir(tmp_path / "ck")
    for path in (".", tmp_path / "ck"):
        accelerator.save_state(path)
    accelerator.load_state(".")
    assert accelerator.save_state("best") == tmp_path / "ck" / "best"


def test_a_name_too_long_for_the_disk_is_an_error_with_a_remedy(accelerator, tmp_path):
    with pytest.raises(CheckpointError, match=r"cannot be saved: .*too long.*\nsave to a"):
        accelerator.save_state(tmp_path / ("n" * 300))

"""Bad input to real libraries: one clear error each, before anything is trained."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest

import accel_trackers
from accel_core import Accelerator, ConfigError


def need(library):
    if importlib.util.find_spec(library) is None:  # importing it here would be too early for some
        pytest.skip(f"{library} is not installed")


def tracked(name, config, folder, project="project", **init):
    need(name)
    made = getattr(accel_trackers, config)(offline=True)
    accelerator = Accelerator(cpu=True, log_with=name, project_dir=folder, plugins=[made])
    try:
        accelerator.init_trackers(project, init_kwargs={name: init} if init else None)
    finally:
        accelerator.end_training()


@pytest.mark.parametrize(
    ("name", "config", "project"),
    [
        ("wandb", "WandbConfig", "team/digits"),
        ("trackio", "TrackioConfig", "registry-digits"),
        ("swanlab", "SwanLabConfig", "dig its/!"),
        ("dvclive", "DVCLiveConfig", " "),
    ],
)
def test_a_project_that_the_library_refuses(home, name, config, project):
    with pytest.raises(ConfigError, match="project") as raised:
        tracked(name, config, home / "out", project)
    assert str(raised.value).splitlines()[-1] in {"take another name", "give init_trackers a name for it"}


@pytest.mark.parametrize(("name", "config"), [("dvclive", "DVCLiveConfig"), ("wandb", "WandbConfig")])
def test_an_argument_that_the_library_does_not_take(home, name, config):
    with pytest.raises(ConfigError, match=r"init_kwargs: \w+ takes no 'resumme'; did you mean 'resume'\?"):
        tracked(name, config, home / "out", resumme=True)


def test_an_option_that_is_misspelt(home, run_command):
    text = "log_with: [wandb]\nwandb: {ofline: true}\n"
    (home / "accel.yaml").write_text(text)
    command = [str(Path(sys.executable).with_name("accel")), "config", "check", "--config", "accel.yaml"]
    said = run_command(command, capture_output=True, text=True, timeout=60, check=False)

    assert said.returncode != 0
    assert "ofline" in said.stderr + said.stdout
    assert "offline" in said.stderr + said.stdout


def test_a_server_is_refused_where_offline_is_asked_for(home):
    need("aim")
    config = accel_trackers.AimConfig(offline=True, directory="aim://elsewhere:53800")
    accelerator = Accelerator(cpu=True, log_with="aim", project_dir=home / "out", plugins=[config])
    with pytest.raises(ConfigError, match="aim: offline is asked for, and directory is aim://elsewhere"):
        accelerator.init_trackers("digits")
    accelerator.end_training()


def test_listing_plugins_imports_no_library(run_command):
    modules = [
        "aim",
        "clearml",
        "comet_ml",
        "dvclive",
        "mlflow",
        "neptune",
        "swanlab",
        "trackio",
        "wandb",
        "torch",
    ]
    code = f"""
import sys
from accel_core import discover
names = {{record.name for record in discover().of("tracker")}}
assert names >= {{"aim", "wandb"}}, names
print([name for name in {modules} if name in sys.modules])
"""
    done = run_command([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


DISK_FULL = """
import resource, sys
from accel_core import Accelerator
import accel_trackers
names = {"dvclive": "DVCLiveConfig", "trackio": "TrackioConfig"}
plugins = [getattr(accel_trackers, config)(offline=True) for config in names.values()]
accelerator = Accelerator(cpu=True, log_with=list(names), project_dir=sys.argv[1], plugins=plugins)
accelerator.init_trackers("digits")
accelerator.log({"loss": 1.0}, step=0)
resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))  # no file may grow beyond it
for step in range(1, 150):
    accelerator.log({"loss": 1.0 / step}, step=step)
accelerator.end_training()
print("trained")
"""


@pytest.mark.full
def test_a_full_disk_costs_data_and_a_word_but_not_the_training(home, run_command):
    for library in ("dvclive", "trackio"):
        need(library)
    done = run_command(
        [sys.executable, "-c", DISK_FULL, str(home / "out")],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "trained" in done.stdout
    assert done.stderr.count("dvclive: 'loss' could not be logged") == 1, done.stderr[-2000:]


def test_every_exported_name_is_there():
    for name in accel_trackers.__all__:
        assert getattr(accel_trackers, name).__name__ == name
    assert importlib.import_module("accel_trackers.cards").__all__

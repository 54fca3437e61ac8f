"""Without a step, libraries count the calls of `log`: numbers and texts of one are one step."""

from __future__ import annotations

import importlib.util
import json
import sqlite3
import sys
from types import SimpleNamespace

import pytest
import read_back

from accel_trackers.libraries.clearml import ClearML

JOB = """
import sys
import accel_trackers
from accel_core import Accelerator
name, config, folder = sys.argv[1:]
plugin = getattr(accel_trackers, config)(offline=True, directory=f"{folder}/{name}")
accelerator = Accelerator(cpu=True, log_with=name, project_dir=folder, plugins=[plugin])
accelerator.init_trackers("digits")
for step in range(3):
    accelerator.log({"train": {"loss": 1.0 + step, "half": 0.5}, "note": f"at {step}"})
    if name == "dvclive" and step == 0:  # of reports
        accelerator.get_tracker(name, unwrap=True).make_summary = lambda **_: open("/no/such/place")
accelerator.end_training()
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("dvclive", "DVCLiveConfig"),
        ("trackio", "TrackioConfig"),
        pytest.param("swanlab", "SwanLabConfig", marks=pytest.mark.full),
        pytest.param("wandb", "WandbConfig", marks=pytest.mark.full),
    ],
)
@pytest.mark.by_default("trackio-TrackioConfig")
def test_numbers_and_texts_of_one_log_are_one_step(home, name, config, run_command):
    """Also where DVCLive cannot write its report of a step."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    command = [sys.executable, "-c", JOB, name, config, str(home)]
    done = run_command(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-2000:]

    _, metrics = read_back.read(name, home / name)
    assert metrics == {"train/loss": {0: 1.0, 1: 2.0, 2: 3.0}, "train/half": dict.fromkeys(range(3), 0.5)}
    if name == "dvclive":
        (rows,) = home.rglob("loss.tsv")
        assert len(rows.read_text().splitlines()) == 4
        (record,) = (home / "records").iterdir()
        assert '"dvclive: the end of a step could not be logged' in record.read_text()


NAMED = """
import sys
import accel_trackers
from accel_core import Accelerator
for _ in range(2):
    plugin = accel_trackers.MLflowConfig(offline=True, directory=sys.argv[1])
    accelerator = Accelerator(cpu=True, log_with="mlflow", project_dir=sys.argv[1], plugins=[plugin])
    accelerator.init_trackers("bob's 実験")
    accelerator.log({"loss": 1.0}, step=0)
    accelerator.end_training()
"""


@pytest.mark.full
@pytest.mark.timeout(180)
def test_two_runs_are_of_one_experiment_whatever_its_name_is(home, run_command):
    if importlib.util.find_spec("mlflow") is None:
        pytest.skip("mlflow is not installed")
    command = [sys.executable, "-c", NAMED, str(home)]
    done = run_command(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "could not be" not in done.stderr

    with sqlite3.connect(home / "mlflow.db") as database:
        query = (
            "select e.name, r.run_uuid from runs r join experiments e on e.experiment_id = r.experiment_id"
        )
        rows = database.execute(query).fetchall()
    assert [name for name, _ in rows] == ["bob's 実験"] * 2


ODD = """
import sys
from accel_core import Accelerator
from accel_trackers import TrackioConfig
plugin = TrackioConfig(offline=True, directory=f"{sys.argv[1]}/trackio")
accelerator = Accelerator(cpu=True, log_with="trackio", project_dir=sys.argv[1], plugins=[plugin])
accelerator.init_trackers("digits", {"lr": 0.1, "seed": 2**70, "nested": {"low": -(2**64)}})
accelerator.log({"train/loss": 1.0}, step=1)
accelerator.end_training()
"""


@pytest.mark.timeout(120)
def test_settings_are_those_that_were_given_however_large_their_numbers(home, run_command):
    if importlib.util.find_spec("trackio") is None:
        pytest.skip("trackio is not installed")
    command = [sys.executable, "-c", ODD, str(home)]
    done = run_command(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-2000:]

    with sqlite3.connect(home / "trackio" / "digits.db") as database:
        ((stored,),) = database.execute("select config from configs")
        assert database.execute("select count(*) from metrics").fetchone() == (1,)
    settings = {name: value for name, value in json.loads(stored).items() if name[0] != "_"}
    assert settings == {"lr": 0.1, "seed": str(2**70), "nested": {"low": str(-(2**64))}}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_a_loss_that_is_not_finite_is_text_to_clearml_which_draws_zero(value):
    told = []
    clearml = ClearML()
    clearml.handle = SimpleNamespace(
        get_logger=lambda: SimpleNamespace(
            report_text=lambda text, **_: told.append(text), report_scalar=lambda **facts: told.append(facts)
        )
    )
    clearml.log({"loss": 1.0, "bad": value}, step=1)
    assert told == [{"title": "loss", "series": "train", "value": 1.0, "iteration": 1}, f"bad: {value}"]

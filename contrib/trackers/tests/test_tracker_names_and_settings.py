"""Names that a library makes files of, and settings that it refuses or cannot change."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from accel_trackers.libraries.dvclive import DVCLive
from accel_trackers.libraries.mlflow import MLflow
from accel_trackers.libraries.swanlab import SwanLab


@pytest.mark.parametrize("name", ["/loss", "../loss", "a/../../loss", "", "."])
def test_no_name_leads_dvclive_out_of_its_folder(name, tmp_path):
    """It makes files of them, so `/loss` was one in the root of the machine."""
    told = []
    dvclive = DVCLive()
    dvclive.handle = SimpleNamespace(
        dir=str(tmp_path), log_metric=lambda *given: told.append(given), log_image=told.append
    )
    for log in (
        lambda: dvclive.log({name: 1.0}),
        lambda: dvclive.log_images({name: [1]}),
        lambda: dvclive.log_table(name, ["a"], [[1]]),
    ):
        with pytest.raises(ValueError, match="would lie outside the run's folder"):
            log()
    dvclive.log({"train/loss": 1.0})
    assert (told, [*tmp_path.iterdir()]) == ([("train/loss", 1.0)], [])


def test_swanlab_has_the_settings_that_were_given_and_no_others():
    settings = {}
    swanlab = SwanLab()
    swanlab.library = SimpleNamespace(config=SimpleNamespace(update=settings.update))  # keywords are taken
    swanlab.configure({"lr": 0.1})
    assert settings == {"lr": 0.1}


class Refused(Exception):
    error_code = "INVALID_PARAMETER_VALUE"


@pytest.fixture
def mlflow():
    """MLflow, with a store that refuses a batch for one bad name, as MLflow's do."""
    kept = {}

    def log_params(values):
        if values.keys() & {"size (%)"}:
            raise Refused("Invalid value")
        kept.update(values)

    made = MLflow()
    made.handle = SimpleNamespace(info=SimpleNamespace(run_id="one"))
    limits = SimpleNamespace(MAX_PARAM_VAL_LENGTH=500, MAX_PARAMS_TAGS_PER_BATCH=100)
    made.library = SimpleNamespace(
        utils=SimpleNamespace(validation=limits),
        get_run=lambda _: SimpleNamespace(data=SimpleNamespace(params=dict(kept))),
        log_params=log_params,
        MlflowException=Refused,
        kept=kept,
    )
    return made


def test_a_setting_that_mlflow_refuses_costs_no_other(mlflow):
    with pytest.raises(ValueError, match=r"^'size \(%\)': Invalid value$"):
        mlflow.configure({"lr": 0.1, "size (%)": 3, "model": {"depth": 2}})
    assert mlflow.library.kept == {"lr": "0.1", "model/depth": "2"}


def test_a_server_that_does_not_answer_is_not_asked_for_each_setting(mlflow, monkeypatch):
    monkeypatch.setattr(Refused, "error_code", "INTERNAL_ERROR")
    with pytest.raises(Refused):
        mlflow.configure({"lr": 0.1, "size (%)": 3})
    assert mlflow.library.kept == {}


def test_settings_that_a_resumed_run_of_mlflow_keeps_are_named(mlflow):
    mlflow.configure({"lr": 0.1, "seed": 1})
    mlflow.configure({"lr": 0.1, "seed": 1})
    with pytest.raises(ValueError, match=r"^lr stays 0.1, and is 0.5 now$"):
        mlflow.configure({"lr": 0.5, "seed": 1, "new": 2})
    assert mlflow.library.kept == {"lr": "0.1", "seed": "1", "new": "2"}

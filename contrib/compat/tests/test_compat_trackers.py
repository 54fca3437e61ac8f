"""Trackers of libraries, by name and by hand. The libraries are stand-ins that note what they are told."""

from __future__ import annotations

import sys
from unittest.mock import MagicMock, call

import pytest
import torch
from accelerate import Accelerator, tracking
from accelerate.utils import LoggerType
from peers import OURS, needs_accelerate, printed, said

from accel_compat.environment import libraries as imports
from accel_core import AccelError


@pytest.fixture
def library(monkeypatch):
    """Puts a stand-in where a library is imported from."""

    def stand_in(*names: str) -> MagicMock:
        made = MagicMock()
        for name in names:
            monkeypatch.setitem(sys.modules, name, made)
        return made

    return stand_in


def started(tracker, **told) -> Accelerator:
    accelerator = Accelerator(cpu=True, log_with=tracker)
    accelerator.init_trackers("project", **told)
    return accelerator


@pytest.mark.needs("accel-trackers")
@pytest.mark.parametrize("name", ["wandb", "trackio", "swanlab"])
def test_a_name_of_log_with_starts_that_librarys_run(name, library, monkeypatch):
    made = library(name)
    monkeypatch.setattr(imports, f"is_{name}_available", lambda: True)
    accelerator = started(name, config={"lr": 1}, init_kwargs={name: {"tags": ["mine"]}})
    accelerator.log({"loss": torch.tensor(2.0)}, step=3)

    run = made.init.return_value
    assert made.init.call_args == call(project="project", tags=["mine"])
    changes = {"allow_val_change": True} if name == "wandb" else {}  # to others it is a setting
    assert made.config.update.call_args == call({"lr": 1}, **changes)
    assert run.log.call_args == call({"loss": 2.0}, step=3)
    assert isinstance(accelerator.get_tracker(name), tracking.LOGGER_TYPE_TO_CLASS[name])
    assert accelerator.get_tracker(name, unwrap=True) is run
    accelerator.end_training()
    run.finish.assert_called_once_with()


def test_tensorboard_writes_numbers_texts_and_mappings(library, tmp_path):
    writer = library("torch.utils.tensorboard").SummaryWriter.return_value
    tracker = tracking.TensorBoardTracker("run", str(tmp_path), flush_secs=1)
    accelerator = started(tracker, config={"lr": 1, "layers": [1, 2]})
    tracker.log({"loss": torch.tensor(2.0), "word": "a", "both": {"x": 1}, "none": None}, step=3)
    tracker.log_images({"shown": "images"}, step=3)
    accelerator.end_training()

    assert writer.add_hparams.call_args == call({"lr": 1, "layers": "[1, 2]"}, metric_dict={})
    assert "lr: 1" in next(tmp_path.rglob("hparams.yml")).read_text()
    assert writer.add_scalar.call_args_list == [call("loss", 2.0, global_step=3)]
    assert writer.add_text.call_args_list == [call("word", "a", global_step=3)]
    assert writer.add_scalars.call_args_list == [call("both", {"x": 1}, global_step=3)]
    assert writer.add_images.call_args_list == [call("shown", "images", global_step=3)]
    writer.close.assert_called_once_with()


@pytest.mark.needs("accel-trackers")
def test_wandb_also_takes_images_and_tables(library):
    made = library("wandb")
    tracker = tracking.WandBTracker("run")
    started(tracker)
    tracker.log_images({"shown": [1, 2]}, step=3)
    tracker.log_table("rows", columns=["a"], data=[[1]], step=3)

    picture, table = made.Image.return_value, made.Table.return_value
    assert tracker.run.log.call_args_list == [
        call({"shown": [picture, picture]}, step=3),
        call({"rows": table}, step=3),
    ]


@pytest.mark.needs("accel-trackers")
def test_comet_is_told_numbers_texts_and_mappings_apart(library):
    writer = library("comet_ml").start.return_value
    accelerator = started(tracking.CometMLTracker("run", online=False), config={"lr": 1})
    accelerator.log({"loss": 2.0, "word": "a", "both": {"x": 1}}, step=3)

    assert writer.mock_calls == [
        call.log_parameters({"lr": 1}),
        call.set_step(3),
        call.log_metric("loss", 2.0, step=3),
        call.log_other("word", "a"),
        call.log_metrics({"x": 1}, step=3),
    ]


@pytest.mark.needs("accel-trackers")
def test_aim_tracks_each_value_and_images_with_captions(library, tmp_path):
    made = library("aim")
    tracker = tracking.AimTracker("run", str(tmp_path), system_tracking_interval=None)
    started(tracker, config={"lr": 1})
    tracker.log({"loss": 2.0}, step=3)
    tracker.log_images({"shown": ("pixels", "a cat")}, step=3, kwargs={"track": {"context": "eval"}})

    assert made.Run.call_args == call(repo=str(tmp_path), system_tracking_interval=None)
    assert made.Image.call_args == call("pixels", caption="a cat")
    assert tracker.tracker.track.call_args_list == [
        call(2.0, name="loss", step=3),
        call(made.Image.return_value, name="shown", step=3, context="eval"),
    ]


@pytest.mark.needs("accel-trackers")
def test_dvclive_goes_on_by_itself(library):
    live = library("dvclive", "dvclive.plots").Live.return_value
    accelerator = started(tracking.DVCLiveTracker(dir="here"), config={"lr": 1})
    accelerator.log({"loss": 2.0}, step=3)

    assert live.step == 4
    assert live.mock_calls == [call.log_params({"lr": 1}), call.log_metric("loss", 2.0), call.next_step()]


@pytest.mark.needs("accel-trackers")
def test_mlflow_starts_a_run_in_the_experiment_of_that_name(library, monkeypatch):
    made = library("mlflow")
    made.search_experiments.return_value = []
    made.utils.validation.MAX_PARAM_VAL_LENGTH, made.utils.validation.MAX_PARAMS_TAGS_PER_BATCH = 5, 2
    monkeypatch.setenv("MLFLOW_TAGS", '{"a": 1}')
    tracker = tracking.MLflowTracker("mine", logging_dir="here")
    started(tracker, config={"a": 1, "long": "x" * 6, "b": 2, "c": 3})
    tracker.log({"loss": 2.0, "word": "left out"}, step=3)

    assert made.create_experiment.call_args == call(name="mine", artifact_location="here", tags={"a": 1})
    assert made.start_run.call_args.kwargs["experiment_id"] is made.create_experiment.return_value
    assert made.log_params.call_args_list == [call({"a": 1, "b": 2}), call({"c": 3})]
    assert made.log_metrics.call_args == call({"loss": 2.0}, step=3)


@pytest.mark.needs("accel-trackers")
def test_clearml_reports_by_series_and_keeps_a_task_that_is_not_its_own(library):
    tasks = library("clearml").Task
    task = tasks.current_task.return_value
    accelerator = started(tracking.ClearMLTracker("run"), config={"lr": 1})
    accelerator.log({"eval_loss": 2.0, "loss": 1.0}, step=3)
    accelerator.log({"best": 1.0})
    accelerator.end_training()

    assert task.get_logger.return_value.mock_calls == [
        call.report_scalar(title="loss", series="eval", value=2.0, iteration=3),
        call.report_scalar(title="loss", series="train", value=1.0, iteration=3),
        call.report_single_value(name="best", value=1.0),
    ]
    tasks.init.assert_not_called()
    task.close.assert_not_called()


def test_a_library_that_is_not_installed_is_refused_with_the_command(monkeypatch):
    monkeypatch.setattr(imports, "is_comet_ml_available", lambda: False)
    with pytest.raises(AccelError, match="comet_ml is not installed\npip install comet-ml"):
        Accelerator(log_with=LoggerType.COMETML)


def test_a_name_that_nobody_has_is_refused():
    with pytest.raises(ValueError, match=r"Unsupported logging capability: wand\. Choose between"):
        Accelerator(log_with="wand")


def test_what_is_there_can_be_asked_for_all_together(monkeypatch):
    for name in (
        "tensorboard",
        "wandb",
        "comet_ml",
        "aim",
        "mlflow",
        "clearml",
        "dvclive",
        "swanlab",
        "trackio",
    ):
        monkeypatch.setattr(imports, f"is_{name}_available", lambda name=name: name in ("wandb", "trackio"))

    assert tracking.get_available_trackers() == [LoggerType.WANDB, LoggerType.TRACKIO]
    assert tracking.filter_trackers("all") == [LoggerType.WANDB, LoggerType.TRACKIO]
    assert tracking.filter_trackers(["wandb", LoggerType.WANDB, "aim"], "here") == [LoggerType.WANDB]


def test_what_is_for_a_tracker_that_is_not_used_is_left_out():
    accelerator = Accelerator(cpu=True)
    accelerator.log({"loss": 1.0})
    accelerator.init_trackers("project", init_kwargs={"wandb": {"name": "x"}})
    accelerator.log({"loss": 1.0}, log_kwargs={"wandb": {}})

    blank = accelerator.get_tracker("wandb")
    assert type(blank) is tracking.GeneralTracker
    blank.log({"loss": 1.0}, step=1)  # and nothing happens


@pytest.mark.needs("accel-trackers")
def test_a_tracker_is_not_started_before_the_accelerator_is_there():
    from accelerate.state import PartialState

    tracking.WandBTracker("run")
    assert PartialState._shared_state == {}


@pytest.mark.needs("accel-trackers")
def test_a_subclass_may_have_a_name_and_a_start_of_its_own(library):
    made = library("wandb")

    class Mine(tracking.WandBTracker):
        name = "mine"

        def start(self):
            self.run = made.attached

    accelerator = started(Mine("run"), config={"lr": 1})
    assert made.config.update.call_args == call({"lr": 1}, allow_val_change=True)
    assert accelerator.get_tracker("mine", unwrap=True) is made.attached


@pytest.mark.needs("accel-trackers")
def test_among_trackers_one_that_is_not_there_is_refused(library):
    library("wandb")
    with pytest.raises(ValueError, match="aim is not an available tracker"):
        started(tracking.WandBTracker("run")).get_tracker("aim")


BLANK = """
import json
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from accelerate.utils import gather_object

class Mine(GeneralTracker):
    name, requires_logging_directory, tracker = "mine", False, "its library's"

accelerator = Accelerator(cpu=True, log_with=Mine())
accelerator.init_trackers("project")
found = [accelerator.get_tracker("mine", unwrap=unwrap) for unwrap in (False, True)]
print(json.dumps(gather_object([[type(each).__name__, hasattr(each, "watch")] for each in found])))
"""


@needs_accelerate
def test_a_rank_that_does_not_log_gets_a_blank_tracker(run_processes):
    theirs = said(run_processes, BLANK, ours=False, processes=2)
    assert theirs[2:] == [["GeneralTracker", False]] * 2
    assert said(run_processes, BLANK, ours=True, processes=2) == theirs


def test_a_folder_is_asked_for_only_by_what_is_installed(monkeypatch):
    monkeypatch.setattr(imports, "is_aim_available", lambda: False)
    assert tracking.filter_trackers(["aim"]) == []

    monkeypatch.setattr(imports, "is_aim_available", lambda: True)
    with pytest.raises(ValueError, match="requires a `logging_dir`"):
        tracking.filter_trackers(["aim"])


def test_a_program_that_is_alone_saves_after_its_trackers_were_finished(library, tmp_path):
    writer = library("torch.utils.tensorboard").SummaryWriter.return_value
    accelerator = started(tracking.TensorBoardTracker("run", str(tmp_path / "logs")))
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    accelerator.end_training()
    accelerator.end_training()
    writer.close.assert_called_once_with()

    accelerator.wait_for_everyone()
    accelerator.save_state(tmp_path / "state")
    accelerator.save_model(model, tmp_path / "model")
    model.weight.data.zero_()
    accelerator.load_state(tmp_path / "state")
    assert model.weight.item() != 0
    assert (tmp_path / "model" / "model.safetensors").exists()
    with pytest.raises(AccelError, match="after they were finished"):
        accelerator.log({"loss": 1.0})


SAVING_AT_THE_END = """
import json, os, torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(2, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.end_training()
accelerator.save_model(model, "model")
weights = accelerator.get_state_dict(model)
if accelerator.is_main_process:
    accelerator.save(accelerator.unwrap_model(model).state_dict(), "weights.bin")
    accelerator.save_state("state")
    files = os.path.isfile("model/model.safetensors"), os.path.isfile("weights.bin")
    written = [*files, os.path.isdir("state")]
    print(json.dumps([*sorted(weights), list(model(torch.ones(1, 2)).shape), *written]))
"""


@needs_accelerate
def test_several_processes_save_after_their_trackers_were_finished(tmp_path, monkeypatch, run_processes):
    seen = []
    for ours in (True, False):
        folder = tmp_path / str(ours)
        folder.mkdir()
        monkeypatch.chdir(folder)
        seen.append(said(run_processes, SAVING_AT_THE_END, ours=ours, processes=2))

    assert seen[0] == seen[1]


ON_TWO_PROCESSES = """
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, LOGGER_TYPE_TO_CLASS


class Mine(GeneralTracker):
    name, requires_logging_directory, main_process_only, tracker = "mine", False, False, None

    def __init__(self, *words):
        super().__init__()

    def start(self):
        print("start")

    def log(self, values, step):
        print(values, step)


class Named(Mine):
    name = "named"


LOGGER_TYPE_TO_CLASS["named"] = Named
accelerator = Accelerator(log_with=ASKED, cpu=True)
accelerator.init_trackers("project")
accelerator.log({"loss": 1}, step=2)
print([type(each).__name__ for each in accelerator.trackers])
"""


@pytest.mark.parametrize(
    ("ours", "asked"),
    [
        (True, "[Mine(), 'named']"),
        pytest.param(False, "[Mine(), Named()]", marks=needs_accelerate),  # whose names are its own
    ],
)
def test_trackers_are_started_on_the_main_process_only(ours, asked, run_processes):
    code = (OURS if ours else "") + ON_TWO_PROCESSES.replace("ASKED", asked)
    main, other = run_processes(printed, code, world=2)

    assert main.split("\n") == [*["start"] * 2, *["{'loss': 1} 2"] * 2, "['Mine', 'Named']", ""]
    assert other == "[]\n"

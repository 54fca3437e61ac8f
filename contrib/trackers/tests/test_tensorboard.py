"""What is logged stands in event files, read back by TensorBoard's own reader."""

from __future__ import annotations

import json

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from accel_core import Accelerator, AccelError, ConfigError


@pytest.fixture
def board(tmp_path):
    """`board(use, ...)`: run `use(accelerator)` with trackers started; what TensorBoard reads then."""

    def run(use=lambda accelerator: None, config=None, **options):
        accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path)
        accelerator.init_trackers("project", config, {"tensorboard": options})
        use(accelerator)
        accelerator.end_training()
        return read(tmp_path / "project")

    return run


def read(folder):
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0, "images": 0})
    return events.Reload()


def text(events, tag):
    return [
        bytes(event.tensor_proto.string_val[0]).decode() for event in events.Tensors(f"{tag}/text_summary")
    ]


def test_numbers_become_scalars_with_their_steps(board):
    def use(accelerator):
        for step in range(3):
            accelerator.log({"loss": torch.tensor(1.5 + step), "rate": 2, "best": True}, step=step)

    events = board(use)

    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(0, 1.5), (1, 2.5), (2, 3.5)]
    assert [event.value for event in events.Scalars("rate")] == [2.0] * 3
    assert [event.value for event in events.Scalars("best")] == [1.0] * 3


def test_nested_names_are_joined_and_none_is_left_out(board):
    events = board(lambda accelerator: accelerator.log({"eval": {"a": {"f1": 0.5}, "loss": None}}))

    assert events.Tags()["scalars"] == ["eval/a/f1"]


def test_two_values_of_one_name_are_refused(board):
    with pytest.raises(AccelError, match="two values called 'eval/loss'\ngive them other names"):
        board(lambda accelerator: accelerator.log({"eval/loss": 1, "eval": {"loss": 2}}))


def test_what_is_not_finite_stays_so(board):
    events = board(lambda accelerator: accelerator.log({"loss": float("inf")}))

    assert events.Scalars("loss")[0].value == float("inf")


def test_text_becomes_text(board):
    assert text(board(lambda accelerator: accelerator.log({"note": "up"}, step=1)), "note") == ["up"]


def test_options_of_a_log_reach_the_writer(board):
    events = board(lambda a: a.log({"x": 1}, log_kwargs={"tensorboard": {"walltime": 7.0}}))

    assert events.Scalars("x")[0].wall_time == 7.0


def test_a_whole_number_that_no_float64_holds_is_text_among_the_settings(board):
    events = board(config={"seed": 2**53 + 1, "huge": 10**400})

    content = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    assert str(2**53 + 1).encode() in content


def test_a_config_may_hold_anything(board):
    config = {"lr": 0.1, "warmup": None, "hidden": [64, 32], "optimizer": {"name": "adam", "betas": (0.9, 1)}}
    events = board(config=config)

    shown = text(events, "config")[0]
    assert json.loads(shown.removeprefix("```json\n").removesuffix("\n```")) == json.loads(json.dumps(config))
    content = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    for name in (b"lr", b"warmup", b"None", b"hidden", b"[64, 32]", b"optimizer/name", b"adam"):
        assert name in content


def test_there_is_one_run_not_one_beside_it(board, tmp_path):
    board(config={"lr": 0.1})

    assert [path.name for path in (tmp_path / "project").iterdir() if path.is_dir()] == []


def test_options_of_the_start_reach_the_writer(board, tmp_path):
    board(filename_suffix=".mine")

    assert list((tmp_path / "project").glob("*.mine"))


@pytest.mark.parametrize("value", [[1, 2], torch.zeros(2), object()])
def test_what_has_no_place_is_an_error_that_names_it(board, value):
    with pytest.raises(AccelError, match="tensorboard has no place for 'x/y', a (list|Tensor|object)"):
        board(lambda accelerator: accelerator.log({"x": {"y": value}}))


@pytest.mark.parametrize("value", [1j, torch.tensor(1j), 10**400], ids=["complex", "tensor", "huge"])
def test_a_number_that_is_no_float_is_an_error_that_names_it(board, value):
    with pytest.raises(AccelError, match="tensorboard has no place for 'x', (1j|1000)"):
        board(lambda accelerator: accelerator.log({"x": value}))


@pytest.mark.parametrize("step", [2**63, -(2**63) - 1])
def test_a_step_that_an_event_cannot_hold_is_an_error(board, step):
    with pytest.raises(AccelError, match="cannot count a step .*: its steps are whole numbers of 64 bits"):
        board(lambda accelerator: accelerator.log({"x": 1.0}, step=step))


def test_values_that_lie_over_each_other_for_want_of_a_step_are_warned_of(board):
    def use(accelerator):
        for loss in (3, 2, 1):
            accelerator.log({"loss": loss})

    with pytest.warns(UserWarning, match="'loss' at step 0, as no step is given; call log") as warned:
        events = board(use)
    assert [event.step for event in events.Scalars("loss")] == [0, 0, 0]
    assert len(warned) == 1


def test_a_value_without_a_step_may_stand_alone(board):
    assert len(board(lambda accelerator: accelerator.log({"best": 1, "name": "a"})).Scalars("best")) == 1


def test_a_step_may_be_a_tensor(board):
    events = board(lambda accelerator: accelerator.log({"x": 1.0}, step=torch.tensor(7)))

    assert events.Scalars("x")[0].step == 7


def test_text_that_is_not_unicode_is_escaped(board):
    use = lambda accelerator: accelerator.log({"said\ud800": "half \ud83d", "x\ud800": 1.0})  # noqa: E731
    events = board(use, config={"note\ud800": "half \ud83d"})

    assert text(events, "said\\ud800") == ["half \\ud83d"]
    assert events.Tags()["scalars"] == ["x\\ud800"]


def test_a_full_disk_costs_what_was_to_be_logged_and_not_the_training(board, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    def use(accelerator):
        writer = accelerator.get_tracker("tensorboard", unwrap=True)
        monkeypatch.setattr(writer.file_writer, "add_summary", fail)
        monkeypatch.setattr(writer.file_writer, "close", fail)
        accelerator.log({"loss": 1.0, "note": "text"}, step=0)

    with pytest.warns(
        UserWarning, match="tensorboard loses values, and training goes on: .*No space"
    ) as said:
        board(use)
    assert len([each for each in said if "loses values" in str(each.message)]) == 1


def test_a_folder_that_cannot_be_written_is_named_with_the_remedy(tmp_path):
    (tmp_path / "project").touch()
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"tensorboard cannot write to .*project: .*\nmake room there"):
        accelerator.init_trackers("project")
    accelerator.end_training()


def test_images_go_through_the_writer_or_the_tracker(board):
    def use(accelerator):
        writer = accelerator.get_tracker("tensorboard", unwrap=True)
        writer.add_image("one", torch.rand(3, 4, 4))
        accelerator.get_tracker("tensorboard").log_images({"many": torch.rand(2, 3, 4, 4)}, step=1)

    assert sorted(board(use).Tags()["images"]) == ["many", "one"]


def test_a_resumed_run_appends(board):
    board(lambda accelerator: accelerator.log({"x": 1}, step=1))
    events = board(lambda accelerator: accelerator.log({"x": 2}, step=2))

    assert [event.value for event in events.Scalars("x")] == [1, 2]


def test_no_folder_is_an_error_at_the_start():
    with pytest.raises(ConfigError, match="tracker tensorboard has no folder to write to"):
        Accelerator(cpu=True, log_with="tensorboard")


def test_a_url_is_no_folder_for_it():
    with pytest.raises(ConfigError, match="tracker tensorboard writes to a local folder, not to s3://bucket"):
        Accelerator(cpu=True, log_with="tensorboard", project_dir="s3://bucket")

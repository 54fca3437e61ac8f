"""accelerator.profile(): what is recorded, and where traces go."""

from __future__ import annotations

import json

import pytest
import torch

from accel_core import Accelerator, ConfigError, ProfileKwargs


@pytest.fixture
def profiled():
    made = []

    def profile(**options):
        made.append(Accelerator(cpu=True, kwargs_handlers=[ProfileKwargs(**options)] if options else None))
        return made[-1]

    yield profile
    for accelerator in made:
        accelerator.end_training()


def work(profiler, steps=1):
    for _ in range(steps):
        torch.ones(8, 8) @ torch.ones(8, 8)
        profiler.step()


def names(path):
    return {event["name"] for event in json.loads(path.read_text())["traceEvents"]}


def test_by_default_the_cpu_is_recorded_and_nothing_written(profiled, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with profiled().profile() as profiler:
        torch.ones(8, 8) @ torch.ones(8, 8)

    assert "aten::mm" in profiler.key_averages().table()
    assert list(tmp_path.iterdir()) == []


def test_a_trace_is_written_for_the_rank(profiled, tmp_path):
    with profiled(output_trace_dir=str(tmp_path / "traces")).profile():
        torch.ones(8, 8) @ torch.ones(8, 8)

    assert "aten::mm" in names(tmp_path / "traces" / "profile_0.json")


def test_the_calls_own_folder_may_be_a_path(profiled, tmp_path):
    with profiled().profile(ProfileKwargs(output_trace_dir=tmp_path / "traces")):
        pass

    assert (tmp_path / "traces" / "profile_0.json").exists()


# torch says, of every schedule with several cycles, that its own table shows the last one only.
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_each_cycle_of_a_schedule_has_its_trace(profiled, tmp_path):
    schedule = {"wait": 1, "warmup": 1, "active": 2, "repeat": 2}
    seen = []
    accelerator = profiled(
        schedule_option=schedule,
        output_trace_dir=str(tmp_path),
        on_trace_ready=lambda profiler: seen.append(profiler.step_num),
    )
    with accelerator.profile() as profiler:
        work(profiler, 10)

    assert seen == [4, 8]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["profile_0.json", "profile_0_1.json"]
    assert {"ProfilerStep#2", "ProfilerStep#3"} <= names(tmp_path / "profile_0.json")


def test_the_call_may_bring_its_own_settings(profiled):
    with profiled(with_flops=True).profile(ProfileKwargs(record_shapes=True)) as profiler:
        torch.ones(8, 8) @ torch.ones(8, 8)

    assert (profiler.record_shapes, profiler.with_flops) == (True, False)


def test_an_activity_torch_cannot_record_is_an_error(profiled):
    with pytest.raises(ConfigError, match=r"cannot record 'cpuu' here; did you mean 'cpu'"):
        profiled(activities=["cpuu"]).profile().__enter__()


def test_an_exception_inside_passes(profiled):
    with pytest.raises(ZeroDivisionError), profiled().profile():
        1 / 0  # noqa: B018


def on_each_rank(folder):
    accelerator = Accelerator(cpu=True)
    with accelerator.profile(ProfileKwargs(output_trace_dir=folder)):
        torch.ones(8, 8) @ torch.ones(8, 8)
    accelerator.end_training()


@pytest.mark.needs("accel-ddp")
def test_each_rank_has_its_trace(tmp_path, run_processes):
    run_processes(on_each_rank, str(tmp_path))

    assert sorted(path.name for path in tmp_path.iterdir()) == ["profile_0.json", "profile_1.json"]

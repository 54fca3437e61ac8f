"""A run with a project folder keeps a record of itself, which costs it nothing but a file."""

from __future__ import annotations

import gc
import json
import math
import os
import signal
import sys
import time
import warnings
import weakref
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_core import (
    Accelerator,
    AccelError,
    AutocastKwargs,
    GradScalerKwargs,
    ProfileKwargs,
)
from accel_monitor import MonitorConfig, metrics, sampling
from accel_testing import ProcessError


def records(folder):
    paths = sorted((folder / "records").glob("*.jsonl"))
    texts = [path.read_text() for path in paths]
    return [[json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()] for text in texts]


def of_kind(record, kind):
    return [line for line in record if line["kind"] == kind]


@pytest.fixture(autouse=True)
def _each_step_is_slow_enough(monkeypatch):
    monkeypatch.setattr(sampling, "CLOSE", 0.0)


def train(folder, steps, *, every=1, accumulation=1, resume=None, die_at=None, save_at=None, config=None):
    """Train a line, log each step's loss, and return the losses."""
    sampling.CLOSE = 0.0  # in a process of its own too
    torch.manual_seed(0)
    monitor = MonitorConfig(every=every)
    accelerator = Accelerator(
        cpu=True, project_dir=folder, plugins=[monitor], gradient_accumulation_steps=accumulation
    )
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = 64 * accumulation * accelerator.num_processes * 2
    loader = DataLoader(TensorDataset(torch.randn(rows, 3)), 2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.init_trackers("line", config)
    losses, window = [], []
    if resume is not None:
        accelerator.load_state(resume)
        losses = [None] * 5
    while len(losses) < steps:
        for (inputs,) in loader:
            with accelerator.accumulate(model):
                loss = model(inputs).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            window.append(loss.item())
            if not accelerator.sync_gradients:
                continue
            losses.append(sum(window) / len(window))
            window = []
            accelerator.log({"loss": loss}, step=len(losses))
            if len(losses) == save_at:
                accelerator.save_state(folder / "saved")
            if len(losses) == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if len(losses) >= steps:
                break
    accelerator.end_training()
    return losses


@pytest.mark.needs("accel-ddp")
def test_the_main_process_records_what_ran_and_each_logged_loss(tmp_path, run_processes):
    losses = run_processes(train, tmp_path, 30)[0]
    (record,) = records(tmp_path)

    head = record[0]
    assert head["kind"] == "run"
    assert head["processes"] == 2
    assert head["explain"][0].endswith("rank 0 of 2 on cpu")
    assert ["project.project_dir", str(tmp_path), "Accelerator(project_dir=...)"] in head["config"]
    assert head["versions"]["torch"] == torch.__version__
    logged = of_kind(record, "log")
    assert [line["step"] for line in logged] == [line["given"] for line in logged] == list(range(1, 31))
    assert [line["values"]["loss"] for line in logged] == losses
    assert record[-1]["kind"] == "end"


def test_a_sample_says_where_the_time_of_its_step_went(tmp_path):
    train(tmp_path, 8, accumulation=2, save_at=4)
    (record,) = records(tmp_path)

    steps = of_kind(record, "step")
    for line in steps:
        assert {"data", "forward", "backward", "optimizer"} <= set(line["split"])
        assert min(line["split"].values()) >= 0
        assert line["lr"] == 0.1
    assert [line["batch"] for line in steps] == [2, 4, 6, 8, 10, 12, 14, 16]
    assert steps[1]["samples_per_second"] == pytest.approx(4 / steps[1]["seconds"])
    assert steps[0]["memory"]["host_peak"] > 0
    assert "checkpoint" in steps[4]["split"]
    (checkpoint,) = of_kind(record, "checkpoint")
    assert (checkpoint["step"], checkpoint["folder"]) == (4, str(tmp_path / "saved"))
    assert checkpoint["seconds"] > 0


def test_a_step_that_was_skipped_for_overflow_says_so(tmp_path):
    monitor = MonitorConfig(every=1)
    scaler = GradScalerKwargs(init_scale=1.0)
    accelerator = Accelerator(
        cpu=True, mixed_precision="fp16", project_dir=tmp_path, plugins=[monitor], kwargs_handlers=[scaler]
    )
    model = nn.Linear(3, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for rows in (torch.ones(2, 3), torch.full((2, 3), math.inf), torch.ones(2, 3)):
        accelerator.backward(model(rows).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()

    (record,) = records(tmp_path)
    assert ["skipped" in line for line in of_kind(record, "step")] == [False, True, False]


def test_the_first_and_every_tenth_step_are_sampled_and_no_other(tmp_path):
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(30):
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()
    (record,) = records(tmp_path)

    assert [line["step"] for line in of_kind(record, "step")] == [1, 10, 20, 30]


def test_short_steps_are_sampled_less_often(tmp_path, monkeypatch):
    monkeypatch.setattr(sampling, "CLOSE", 1e9)
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(30):
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
    accelerator.end_training()

    assert [line["step"] for line in of_kind(records(tmp_path)[0], "step")] in ([], [1])


class Clock:
    """A clock for samples that goes on by steps alone."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(sampling, "time", self)
        monkeypatch.setattr(sampling, "CLOSE", 0.05)

    def perf_counter(self):
        return self.now


def sampled(folder, clock, seconds, monkeypatch):
    """Return the steps of these lengths that were sampled, and those after which the clock was read."""
    looks, arm = [], sampling.Sampler._arm

    def counted(self):
        looks.append(self.count)
        arm(self)

    monkeypatch.setattr(sampling.Sampler, "_arm", counted)
    monitor = MonitorConfig(every=1)
    accelerator = Accelerator(cpu=True, project_dir=folder, plugins=[monitor])
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    inputs = torch.ones(1, 2)
    for each in seconds:
        accelerator.backward(model(inputs).sum())
        clock.now += each
        optimizer.step()
    accelerator.end_training()
    return [line["step"] for line in of_kind(records(folder)[0], "step")], looks


def test_the_longer_a_run_has_been_the_further_apart_are_its_samples(tmp_path, monkeypatch):
    # As 40,000 steps of 240 us, of which every tenth may be sampled.
    steps, looks = sampled(tmp_path, Clock(monkeypatch), [0.0024] * 4000, monkeypatch)

    assert len([step for step in steps if step <= 400]) >= 14  # the first second's
    assert 60 <= len(steps) <= 79  # 50 ln(1 + 9.6 / 2.5); 20 a second would be 192
    late = [step for step in steps if step > 3200]
    assert min(after - before for before, after in pairwise(late)) * 0.0024 >= 0.2
    assert len([step for step in looks if step > 3200]) <= 800 / 6  # each costs more than a plain step


def test_a_run_that_slows_down_is_sampled_soon(tmp_path, monkeypatch):
    seconds = [0.0024] * 1000 + [3.0] * 40
    steps, _ = sampled(tmp_path, Clock(monkeypatch), seconds, monkeypatch)

    first = next(step for step in steps if step > 1000)
    assert first <= 1000 + sampling.AHEAD + 1
    slow = steps[steps.index(first) :]
    assert max(after - before for before, after in pairwise([*slow, 1041])) <= 2


def killed(folder):
    train(folder, 12, save_at=5, die_at=8)


def test_a_killed_run_goes_on_in_the_same_record(tmp_path, run_processes):
    whole = train(tmp_path / "whole", 12)
    with pytest.raises(ProcessError):
        run_processes(killed, tmp_path, world=1)
    train(tmp_path, 12, resume=tmp_path / "saved")
    (record,) = records(tmp_path)

    assert [line["step"] for line in of_kind(record, "run")] == [0, 5]
    assert [line["step"] for line in of_kind(record, "log")] == [*range(1, 9), *range(6, 13)]
    assert [line["values"]["loss"] for line in of_kind(record, "log")][8:] == whole[5:]
    assert [line["step"] for line in of_kind(record, "step")][-1] == 12


def test_a_process_that_still_writes_keeps_its_record_to_itself(tmp_path):
    first, second = (Accelerator(cpu=True, project_dir=tmp_path) for _ in range(2))
    first.init_trackers("a")
    first.log({"x": 1})
    first.save_state(tmp_path / "saved")
    second.load_state(tmp_path / "saved")
    second.init_trackers("b")
    second.log({"x": 2})
    first.end_training()
    second.end_training()

    values = [[line["values"]["x"] for line in of_kind(record, "log")] for record in records(tmp_path)]
    assert sorted(values) == [[1], [2]]


@pytest.mark.parametrize("name", ["../elsewhere", "/tmp/elsewhere", "a/b"])
def test_a_checkpoint_names_no_file_elsewhere(tmp_path, name):
    accelerator = Accelerator(cpu=True, project_dir=tmp_path / "project")
    accelerator.run.plugins["monitor"].load_state_dict({"name": name, "step": 3})
    accelerator.init_trackers("a")
    accelerator.log({"x": 1})
    accelerator.end_training()

    assert [path.name for path in tmp_path.iterdir()] == ["project"]
    assert of_kind(records(tmp_path / "project")[0], "run")[0]["step"] == 3


def test_no_secret_is_recorded(tmp_path, monkeypatch):
    secret = "sk-no-one-may-read-this"
    monkeypatch.setenv("WANDB_API_KEY", secret)
    monkeypatch.setattr("sys.argv", ["train.py", "--token", secret])
    secrets = {"api_key": secret, "nested": {"password": secret}, "store": [f"https://me:{secret}@host/data"]}
    train(tmp_path, 2, config={**secrets, "lr": 0.5})
    (path,) = (tmp_path / "records").iterdir()

    assert secret not in path.read_text()
    values = of_kind(records(tmp_path)[0], "settings")[0]["values"]
    assert (values["lr"], values["store"]) == (0.5, ["https://***@host/data"])


def test_a_record_that_cannot_be_written_is_one_warning(tmp_path):
    (tmp_path / "records").touch()  # no folder can be made there
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        losses = train(tmp_path, 20)

    assert len(losses) == 20
    (only,) = [str(one.message) for one in told if "record" in str(one.message)]
    assert only.startswith("the run's record ends, and training goes on: FileExistsError")


def test_a_disk_that_fills_up_is_one_warning(tmp_path, monkeypatch):
    from accel_core.defaults import lines

    plain, writes = lines.LineFile.write, []

    def full(self, **fields):
        writes.append(fields)
        if len(writes) > 5:
            raise OSError(28, "No space left on device")
        plain(self, **fields)

    monkeypatch.setattr(lines.LineFile, "write", full)
    with pytest.warns(UserWarning, match="No space left") as told:
        assert len(train(tmp_path, 20)) == 20
    assert len(told) == 1
    assert len(writes) == 6


def test_metrics_of_a_record_that_has_failed_are_none_and_no_error(tmp_path):
    (tmp_path / "records").write_text("in the way")
    accelerator, model, optimizer = alone(tmp_path)
    with pytest.warns(UserWarning, match="the run's record ends"):
        step(accelerator, model, optimizer)

    assert metrics(accelerator) == {}


def test_a_record_keeps_no_optimizer_alive_that_was_freed(tmp_path):
    accelerator, model, optimizer = alone(tmp_path)
    step(accelerator, model, optimizer)
    alive = weakref.ref(optimizer.optimizer)

    model, optimizer = accelerator.free_memory(model, optimizer)
    gc.collect()

    assert alive() is None


DROPPED = """
import gc
import torch
from accel_core import Accelerator

accelerator = Accelerator(cpu=True, project_dir=".")
model = torch.nn.Linear(3, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.backward(model(torch.ones(2, 3)).sum())
optimizer.step()
del accelerator, model, optimizer
gc.collect()
"""


def test_a_run_that_is_dropped_and_collected_exits_without_a_warning(tmp_path, run_command):
    command = [sys.executable, "-c", DROPPED]
    ended = run_command(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)

    assert (ended.returncode, ended.stderr) == (0, "")
    assert [len(of_kind(record, "step")) for record in records(tmp_path)] == [1]


def test_steps_of_the_first_optimizer_that_is_prepared_anew_are_counted(tmp_path):
    accelerator, model, optimizer = alone(tmp_path)
    step(accelerator, model, optimizer)
    accelerator.free_memory()
    again = accelerator.prepare(nn.Linear(3, 1))
    step(accelerator, *accelerator.prepare(again, torch.optim.SGD(again.parameters(), lr=0.1)))

    assert accelerator.run.plugins["monitor"].sampler.count == 2


def test_text_that_is_no_unicode_is_recorded(tmp_path):
    accelerator, *_ = alone(tmp_path)
    accelerator.init_trackers("line")
    accelerator.log({"path": "a\udcff"})
    accelerator.end_training()

    ((*_, logged, _),) = records(tmp_path)
    assert logged["values"] == {"path": "a\udcff"}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
def test_a_fork_that_lives_on_keeps_no_lock_on_the_record(tmp_path):
    import fcntl

    accelerator, model, optimizer = alone(tmp_path)
    step(accelerator, model, optimizer)
    lives, says = os.pipe()
    child = os.fork()
    if not child:
        os.write(says, b"x")
        time.sleep(60)
        os._exit(0)
    try:
        os.read(lives, 1)
        accelerator.end_training()
        (path,) = (tmp_path / "records").iterdir()
        with path.open("a") as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_window_that_the_loader_cuts_counts_the_samples_that_it_has(tmp_path):
    monitor = MonitorConfig(every=1)
    accelerator = Accelerator(
        cpu=True, project_dir=tmp_path, plugins=[monitor], gradient_accumulation_steps=3
    )
    model = nn.Linear(3, 1)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.0), DataLoader(torch.ones(10, 3), 2)
    )
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.end_training()

    (record,) = records(tmp_path)
    first, last = of_kind(record, "step")
    assert [first["step"], last["step"]] == [1, 2]
    assert last["samples_per_second"] * last["seconds"] == pytest.approx(4)


def alone(folder):
    accelerator = Accelerator(cpu=True, project_dir=str(folder))
    model = nn.Linear(3, 1)
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def step(accelerator, model, optimizer):
    accelerator.backward(model(torch.ones(2, 3)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.needs("accel-ddp")
def test_metrics_are_the_last_sample_as_values_to_log(tmp_path, run_processes):
    ours, other = run_processes(metered, str(tmp_path), world=2)
    ((*_, sample),) = [of_kind(record, "step") for record in records(tmp_path)]
    split = {f"{part}_seconds": seconds for part, seconds in sample["split"].items()}
    expected = {**split, **{name: sample[name] for name in ("seconds", "items_per_second")}}
    assert {name: ours[name] for name in expected} == expected
    assert ours["data_seconds"] >= 0.05, "each batch is waited for"
    assert ours["samples_per_second"] == pytest.approx(4 / sample["seconds"])
    assert ours["memory_host_peak"] > 0
    assert all(type(value) in (int, float) for value in ours.values())
    assert other == {}, "the main process keeps the record"


class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        time.sleep(0.05)
        return torch.ones(3) * index


def metered(folder):
    sampling.CLOSE = 0.0
    monitor = MonitorConfig(every=1)
    accelerator = Accelerator(cpu=True, project_dir=folder, plugins=[monitor])
    assert metrics(accelerator) == {}
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Slow(), 2))
    for window in accelerator.windows(loader, model, items=len):
        for batch in window:
            accelerator.backward(model(batch).square().sum())
            optimizer.step()
            optimizer.zero_grad()
    found = metrics(accelerator)
    accelerator.end_training()
    return found


def test_metrics_of_a_run_without_a_record_are_an_error():
    with pytest.raises(AccelError, match="keeps none\nset project_dir"):
        metrics(Accelerator(cpu=True))


def test_flops_without_the_devices_peak_are_no_utilization(tmp_path):
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)  # no vendor states the peak of "the CPU"
    model = nn.Linear(2, 1)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(torch.ones(8, 2), 2)
    )
    for batch in loader:
        accelerator.backward(model(batch).sum())
        optimizer.step()

    assert "mfu" not in metrics(accelerator, flops_per_sample=12.0)


def test_flops_are_given_once(tmp_path):
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)

    with pytest.raises(AccelError, match="two counts of the same FLOPs\ngive it one of them"):
        metrics(accelerator, flops_per_sample=1.0, flops_per_item=1.0)


def used(folder, precision, dtype, counts, more=None):
    """Train on a simulated device of 1e12 FLOP/s in float32 and 2e12 in 16 bits."""
    from accel_testing.simulated import declare

    sampling.CLOSE = 0.0
    declare(folder / "plugins")
    monitor = MonitorConfig(every=1)
    accelerator = Accelerator(
        device="sim",
        mixed_precision=precision,
        project_dir=folder,
        plugins=[monitor],
        kwargs_handlers=more or [],
    )
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).to(dtype[0])
    model[1].to(dtype[-1])
    if dtype[0] != dtype[-1]:
        model[0].register_forward_hook(lambda _, inputs, output: output.to(dtype[-1]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(torch.ones(8, 4, dtype=dtype[0]), 2)
    )
    for window in accelerator.windows(loader, model, items=lambda batch: 3):
        for batch in window:
            accelerator.backward(model(batch).float().sum())
            optimizer.step()
            optimizer.zero_grad()
    found = metrics(accelerator, **counts)
    accelerator.end_training()
    return found


FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16


@pytest.mark.simulated
@pytest.mark.needs("accel-ddp")
@pytest.mark.parametrize(
    ("precision", "dtype", "peak"),
    [
        ("no", [FLOAT32], 1e12),
        ("no", [BFLOAT16], 2e12),
        ("no", [BFLOAT16, FLOAT32], None),
        ("no", [torch.float64], None),
        ("bf16", [FLOAT32], 2e12),
    ],
)
def test_utilization_is_the_models_flops_over_the_peak_in_the_runs_dtype(
    tmp_path, precision, dtype, peak, run_processes
):
    (found,) = run_processes(used, tmp_path, precision, dtype, {"flops_per_sample": 5e8}, world=1)

    assert found.get("mfu") == (
        None if peak is None else pytest.approx(found["samples_per_second"] * 5e8 / peak)
    )


@pytest.mark.simulated
@pytest.mark.needs("accel-ddp")
def test_autocast_that_is_off_leaves_the_dtype_of_the_parameters(tmp_path, run_processes):
    off = [AutocastKwargs(enabled=False)]
    (found,) = run_processes(used, tmp_path, "bf16", [FLOAT32], {"flops_per_item": 5e8}, off, world=1)

    assert found["mfu"] == pytest.approx(found["items_per_second"] * 5e8 / 1e12)


@pytest.mark.simulated
@pytest.mark.needs("accel-ddp")
def test_utilization_counts_the_devices_of_all_ranks(tmp_path, run_processes):
    ours, other = run_processes(used, tmp_path, "no", [FLOAT32], {"flops_per_item": 5e8}, world=2)
    (record,) = records(tmp_path)

    assert ours["mfu"] == pytest.approx(ours["items_per_second"] * 5e8 / 2e12)
    assert other == {}
    assert of_kind(record, "run")[0]["device_specs"]["flops"]["float32"] == 1e12
    assert of_kind(record, "run")[0]["device_specs"]["source"] == "accel-testing: made up"


@pytest.mark.simulated
@pytest.mark.needs("accel-ddp")
def test_a_sample_has_what_the_devices_sensors_tell(tmp_path, run_processes):
    run_processes(used, tmp_path, "no", [FLOAT32], {}, world=1)
    (record,) = records(tmp_path)
    first, second, *_ = of_kind(record, "step")

    assert first["health"] == {
        "temperature": 40,
        "power": 20.0,
        "clock": 1000,
        "busy": 0.5,
        "throttled": ["made_up"],
    }
    assert "health" not in second, "sensors are looked at once a second at most"


def test_an_option_turns_it_off(tmp_path):
    train(tmp_path, 3, every=0)

    assert not (tmp_path / "records").exists()


def test_a_run_without_a_project_folder_has_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Accelerator(cpu=True).end_training()

    assert [*tmp_path.iterdir()] == []


def test_warnings_are_recorded(tmp_path):
    from accel_core import get_logger

    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    get_logger("somebody").warning("%d of %s, not %s", 3, "many", "https://me:secret@host")
    accelerator.end_training()

    (warning,) = of_kind(records(tmp_path)[0], "warning")
    assert (warning["text"], warning["step"]) == ("3 of many, not https://***@host", 0)


def test_traces_of_the_profiler_are_recorded(tmp_path):
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    with accelerator.profile(ProfileKwargs(output_trace_dir=str(tmp_path / "traces"))):
        torch.ones(2) + 1
    accelerator.end_training()

    (profile,) = of_kind(records(tmp_path)[0], "profile")
    assert profile["path"] == str(tmp_path / "traces" / "profile_0.json")


def train_on_items(folder):
    """Train two windows of two micro-batches, whose items differ by rank."""
    sampling.CLOSE = 0.0
    accelerator = Accelerator(
        cpu=True,
        project_dir=folder,
        plugins=[MonitorConfig(every=1)],
        gradient_accumulation_steps=2,
    )
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batches, count = [torch.ones(1, 2)] * 4, 3 + 2 * accelerator.process_index
    for window in accelerator.windows(batches, model, items=lambda batch: count):
        for batch in window:
            accelerator.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
    accelerator.end_training()


@pytest.mark.needs("accel-ddp")
def test_items_a_second_are_those_of_all_ranks(tmp_path, run_processes):
    run_processes(train_on_items, tmp_path)

    first, second = of_kind(records(tmp_path)[0], "step")
    assert "items_per_second" not in first  # it has no time yet
    assert second["items_per_second"] * second["seconds"] == pytest.approx(2 * (3 + 5))


def waits_on_a_device(folder):
    """How often the host waits for the device in each step, without and with a record."""
    from accel_testing.simulated.device import simulate

    sampling.CLOSE = 0.0
    module = simulate("sim")
    found = []
    for project in (None, folder):
        accelerator = Accelerator(device="sim", project_dir=project)
        model = nn.Linear(2, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        accelerator.init_trackers("a")
        inputs, waits = torch.ones(1, 2).to("sim"), []
        for _ in range(12):
            before = module.waits
            (window,) = accelerator.windows([inputs], model, items=len)
            for batch in window:
                loss = model(batch).sum()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            accelerator.log({"loss": loss})
            waits.append(module.waits - before)
        found.append(waits)
        accelerator.end_training()
    return found


@pytest.mark.simulated
@pytest.mark.needs("accel-ddp")
def test_the_device_is_not_waited_for(tmp_path, run_processes):
    ((without, recording),) = run_processes(waits_on_a_device, tmp_path, world=1)

    assert recording == without
    (record,) = records(tmp_path)
    assert [line["step"] for line in of_kind(record, "step")] == [1, 10]
    assert of_kind(record, "step")[1]["items_per_second"] > 0

"""Ranks that the others wait for are named: in the record, and in one line of the log."""

from __future__ import annotations

import io
import json
import os
import threading
import time
from contextlib import redirect_stderr
from statistics import median

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.utils.data import DataLoader, Dataset

from accel_core import Accelerator, World
from accel_monitor import MonitorConfig, hangs, metrics, pace, sampling

SLOW = 0.2


class Rows(Dataset):
    def __init__(self, seconds):
        self.seconds = seconds

    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        time.sleep(self.seconds())
        return torch.ones(3)


def train(folder, what, phases):
    """Train while rank 1 is slow in `what`, until that is found; in a second phase, until it no longer is.

    Return metrics() at the end, the watch's threads after it, and what was said of slow ranks.
    """
    with redirect_stderr(io.StringIO()) as log:
        found = _train(folder, what, phases)
    threads = [thread.name for thread in threading.enumerate() if thread.name == "accel-watch"]
    return found, threads, [line for line in log.getvalue().splitlines() if "slow" in line]


def _train(folder, what, phases):
    sampling.CLOSE, hangs.LOOK_SECONDS, pace.PUBLISH_SECONDS = 0.0, 0.1, 0.5
    pace.LATE_SECONDS = SLOW / 2  # a busy machine delays steps by more than 5 ms
    monitor = MonitorConfig(every=2)
    accelerator = Accelerator(cpu=True, project_dir=folder, plugins=[monitor])
    phase, last = 0, 20

    def pause(where):
        return SLOW if accelerator.process_index == 1 and where == what and phase == 0 else 0.0

    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: time.sleep(pause("optimizer")))
    loader = DataLoader(Rows(lambda: pause("data")), 1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    own = accelerator.run.plugins["monitor"]._pace
    for inputs in loader:
        outputs = model(inputs)
        time.sleep(pause("forward"))
        accelerator.backward(outputs.square().mean())
        optimizer.step()
        optimizer.zero_grad()
        is_found = accelerator.is_main_process and bool(own._slow) == (phase == 0)
        phase += int(accelerator.reduce(torch.tensor(float(is_found)), "sum"))
        last -= phase >= phases  # some steps more, in which the record takes it
        if not last:
            break
    found = metrics(accelerator)
    accelerator.end_training()
    return found


def lines_of(folder):
    (record,) = (folder / "records").glob("*.jsonl")
    return [json.loads(line) for line in record.read_text().splitlines()]


@pytest.mark.needs("accel-ddp")
@pytest.mark.parametrize(
    "what", ["forward", *(pytest.param(what, marks=pytest.mark.full) for what in ("data", "optimizer"))]
)
@pytest.mark.full
def test_the_rank_that_others_wait_for_is_in_the_record_and_in_a_line_of_the_log(
    tmp_path, what, run_processes
):
    (_, *threads, said), (metrics, *more, silent) = run_processes(train, tmp_path, what, 1)

    # On a busy machine a rank may have too few steps for a comparison.
    compared = [line["ranks"] for line in lines_of(tmp_path) if len(line.get("ranks", ())) == 2]
    # When it is found; later ones may be of steps without pauses.
    first, second = next(ranks for ranks in compared if ranks[0]["slow"])
    assert (first["rank"], second["rank"], second["slow"]) == (1, 0, False)
    assert first["own"] > SLOW
    assert first["own"] > second["own"]
    assert (first["data"] > SLOW) == (what == "data")
    assert first["seconds"] == pytest.approx(second["seconds"], rel=0.9), "they wait for each other"
    assert first["memory"]["host_peak"] > 0
    assert first["host"] == os.uname().nodename
    assert (len(said), silent) == (1, []), "not once for each publication"
    assert said[0].startswith(f"accel: slow: rank 1 on {first['host']}, for which the others wait: ")
    assert [f"accel: {line['text']}" for line in lines_of(tmp_path) if line["kind"] == "warning"] == said
    assert (threads, more) == ([[]], [[]])
    assert metrics == {}, "they are the main process's"


@pytest.mark.full
@pytest.mark.needs("accel-ddp")
def test_a_rank_that_keeps_up_again_is_said_once_too(tmp_path, run_processes):
    said = run_processes(train, tmp_path, "forward", 2)[0][-1]

    assert [line.split(",")[0].split(" on ")[0] for line in said] == [
        "accel: slow: rank 1",
        "accel: no rank is slow any more",
    ]


# -- the rule, by what ranks publish ------------------------------------------------------------------


@pytest.fixture
def ranks(monkeypatch):
    """A rank's publications by hand: publish(seconds of its own by rank), and what rank 0 then has."""
    monkeypatch.setattr(pace, "PUBLISH_SECONDS", 0.0)
    store, paces = HashStore(), {}

    def publish(owns, *, data=0.0):
        for rank in sorted(owns, reverse=True):
            if rank not in paces:
                paces[rank] = pace.Pace(World(rank=rank, size=len(owns)))
            if owns[rank] is None:
                paces[rank].ended = True
            else:
                part = data if rank == 1 else 0.0
                sample = {"step": 1, "seconds": 1.0, "own": owns[rank], "split": {"data": part}}
                paces[rank].note({**sample, "own": 9.0} if rank == 2 else sample)  # a save, an evaluation
                for _ in range(2):
                    paces[rank].note(sample)
            paces[rank].publish(store)
        return [rank["rank"] for rank in paces[0].slowest if rank["slow"]]

    return publish, store, paces


def test_a_rank_is_slow_after_three_late_publications_and_until_it_was_on_time_as_often(ranks):
    publish, _, paces = ranks
    late, on_time = {0: 0.1, 1: 0.4, 2: 0.1}, {0: 0.1, 1: 0.2, 2: 0.1}
    seen = [publish(owns) for owns in (late, on_time, late, late, late, on_time, on_time, late, on_time)]
    assert seen == [[], [], [], [], [1], [1], [1], [1], [1]]
    assert publish(on_time) == []
    assert len(paces[0].said) == 2


def test_time_for_data_tells_a_slow_rank_where_the_forward_waits_too(ranks):
    publish, _, _ = ranks
    for _ in range(3):
        slow = publish({0: 0.5, 1: 0.5, 2: 0.5}, data=0.4)
    assert slow == [1]


def test_of_two_ranks_the_faster_one_is_the_measure(ranks):
    publish, _, _ = ranks
    assert [publish({0: 0.1, 1: 0.35}) for _ in range(3)][-1] == [1]


def test_a_rank_that_ends_leaves_nothing_and_nobody_waits_for_it(ranks):
    publish, store, _ = ranks
    for _ in range(20):
        publish({0: 0.1, 1: 0.1, 2: 0.1})
    assert store.num_keys() == 3, "a key for each rank, however long the run"
    publish({0: 0.1, 1: 0.1, 2: None})
    assert publish({0: 0.1, 1: 0.1, 2: None}) == []
    publish({0: None, 1: None, 2: None})
    assert store.num_keys() == 0


def test_the_key_of_a_rank_that_ends_is_deleted_once(ranks):
    publish, store, paces = ranks
    publish({0: 0.1, 1: 0.1})
    paces[1].ended = True
    paces[1].publish(store)
    store.set("pace/1", "of a run that came after")
    paces[1].publish(store)
    assert store.get("pace/1") == b"of a run that came after"


def test_a_rank_that_no_longer_publishes_is_not_compared(ranks):
    publish, _, paces = ranks
    publish({0: 0.1, 1: 0.1, 2: 0.1})
    publish({0: 0.1, 1: 0.1})
    publish({0: 0.1, 1: 0.1})
    assert [rank["rank"] for rank in paces[0].slowest] == [0, 1]


def test_a_rank_that_publishes_after_a_comparison_is_in_it_and_late_once(ranks):
    publish, _, paces = ranks
    for _ in range(2):
        assert publish({0: 0.1, 1: 0.4}) == []
        assert publish({0: 0.1}) == [], "two publications of rank 1 were late, at most"
        assert sorted(rank["rank"] for rank in paces[0].slowest) == [0, 1]
    assert publish({0: 0.1, 1: 0.4}) == [1]


def test_one_long_batch_of_slow_steps_is_left_out_by_the_median_as_well():
    store, (first, second) = HashStore(), (pace.Pace(World(rank=rank, size=2)) for rank in range(2))
    for each in (second, first):
        each._at = -pace.PUBLISH_SECONDS
    for own in (0.9, 0.1, 0.1):
        assert store.num_keys() == 0, "a median of less would be the long batch"
        for each, seconds in ((second, own), (first, 0.1)):
            each.note({"step": 1, "seconds": 10.0, "own": seconds, "split": {}})
            each.publish(store)
    assert [rank["own"] for rank in first.slowest] == [0.1, 0.1]


def test_a_world_of_one_has_no_thread_and_no_pace(tmp_path):
    monitor = MonitorConfig(every=1)
    accelerator = Accelerator(cpu=True, project_dir=tmp_path, plugins=[monitor])
    assert accelerator.run.plugins["monitor"]._pace is None
    assert "accel-watch" not in [thread.name for thread in threading.enumerate()]
    accelerator.end_training()


class Paused(nn.Linear):
    seconds = 0.0

    def forward(self, inputs):
        time.sleep(self.seconds)
        return super().forward(inputs)


class PausedSGD(torch.optim.SGD):
    seconds = 0.0

    def step(self, closure=None):
        time.sleep(self.seconds)
        return super().step(closure)


def gather_while_rank_1_is_slow(folder, where):
    sampling.CLOSE = 0.0
    monitor = MonitorConfig(every=1)
    accelerator = Accelerator(cpu=True, project_dir=folder, plugins=[monitor])
    model = Paused(3, 1)
    optimizer = PausedSGD(model.parameters(), lr=0.1)
    if accelerator.process_index == 1:
        {"forward": model, "optimizer": optimizer}[where].seconds = SLOW
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(8):
        loss = model(torch.ones(1, 3)).mean()
        if where == "forward":
            accelerator.gather(loss.detach())
        accelerator.backward(loss)
        optimizer.step()
        if where == "optimizer":
            accelerator.gather(loss.detach())
    accelerator.end_training()


@pytest.mark.full
@pytest.mark.needs("accel-ddp")
@pytest.mark.parametrize("where", ["forward", "optimizer"])
def test_waiting_for_a_slow_rank_in_a_gather_is_not_ones_own_time(tmp_path, where, run_processes):
    run_processes(gather_while_rank_1_is_slow, tmp_path, where)

    steps = [line for line in lines_of(tmp_path) if line["kind"] == "step"][2:]
    assert median(step["own"] for step in steps) < SLOW / 2
    assert median(step["split"]["collectives"] for step in steps) > SLOW / 2


def own_time_while_the_optimizer_of_rank_1_is_slow(folder):
    sampling.CLOSE, pace.PUBLISH_SECONDS = 0.0, float("inf")
    monitor = MonitorConfig(every=1)
    accelerator = Accelerator(device="cpu", strategy="fsdp", project_dir=folder, plugins=[monitor])
    model = nn.Linear(3, 1)
    optimizer = PausedSGD(model.parameters(), lr=0.1)
    optimizer.seconds = float(accelerator.process_index)
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(5):
        accelerator.backward(model(torch.ones(1, 3)).mean())
        optimizer.step()
    own = sum(sample["own"] for sample in accelerator.run.plugins["monitor"]._pace._samples)
    accelerator.end_training()
    return own


@pytest.mark.full
@pytest.mark.needs("accel-fsdp")
def test_nobody_is_slow_where_the_forward_waits_for_a_slow_optimizer(tmp_path, run_processes):
    waits, works = run_processes(own_time_while_the_optimizer_of_rank_1_is_slow, tmp_path)

    assert min(waits, works) > 1, "a second for each step"

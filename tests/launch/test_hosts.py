"""Hosts that fail while they train: cut off, killed, back again. Nobody hangs."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from two_hosts import Host, two_hosts, wait_for

pytestmark = [pytest.mark.full, pytest.mark.needs("accel-ddp")]

TIMEOUT = "10"
"""Seconds that ranks wait for each other."""
TRAIN = """
import json, time
from pathlib import Path
import torch
from accel_core import Accelerator

class Steps:
    done = 0
    def state_dict(self):
        return {"done": self.done}
    def load_state_dict(self, state):
        self.done = state["done"]

accelerator = Accelerator()
model = torch.nn.Linear(2, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
steps = Steps()
accelerator.register_for_checkpointing(steps)
resumed = accelerator.load_state("last", missing_ok=True) is not None
began = steps.done
while steps.done < 200:
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    optimizer.zero_grad()
    steps.done += 1
    if steps.done % 5 == 0:
        accelerator.save_state("last")
        if accelerator.is_main_process:
            Path("saved").write_text(str(steps.done))
    time.sleep(0 if resumed or Path("hurry").exists() else 0.1)
if accelerator.is_main_process:
    Path("done").write_text(json.dumps({"began": began, "ended": steps.done}))
accelerator.end_training()
"""


@pytest.fixture
def hosts(tmp_path: Path, make_hosts) -> Iterator[Sequence[Host]]:
    (tmp_path / "train.py").write_text(TRAIN)
    with two_hosts(make_hosts, tmp_path) as hosts:
        yield hosts


def train(hosts: Sequence[Host], folder: Path, *flags: str, blocked: str = "") -> None:
    """Start both hosts, and return when they have saved a checkpoint."""
    environment = {"ACCEL_PLUGINS_BLOCK": blocked}
    for host in reversed(hosts):
        host.launch("--process-group.timeout", TIMEOUT, *flags, "train.py", environment=environment)
    wait_for((folder / "saved").exists, lambda: hosts[0].said() + hosts[1].said())


def done(folder: Path) -> dict[str, int]:
    facts: dict[str, int] = json.loads((folder / "done").read_text())
    return facts


@pytest.mark.parametrize(
    "blocked",
    ["monitor", pytest.param("", marks=pytest.mark.needs("accel-monitor"))],
    ids=["alone", "with a thread that asks the store"],
)
def test_hosts_that_are_cut_off_end(hosts, tmp_path, blocked):
    train(hosts, tmp_path, blocked=blocked)

    hosts[1].cable("down")

    assert [host.ends() for host in hosts] == [1, 1]
    assert all(f"rank {host.node} (local 0) failed: " in host.said() for host in hosts)


@pytest.mark.parametrize("lost", [0, 1])
def test_the_host_that_is_left_ends(hosts, tmp_path, lost):
    train(hosts, tmp_path)

    hosts[lost].dies()

    left = hosts[1 - lost]
    assert left.ends() in (1, 128 + signal.SIGABRT)  # gloo now and then aborts for want of a peer
    assert f"rank {left.node} (local 0) " in left.said()


def test_a_cut_that_is_shorter_than_the_time_out_is_trained_through(hosts, tmp_path):
    train(hosts, tmp_path)

    hosts[1].cable("down")
    time.sleep(2)
    hosts[1].cable("up")
    (tmp_path / "hurry").touch()

    assert [host.ends() for host in hosts] == [0, 0], hosts[0].said() + hosts[1].said()
    assert done(tmp_path) == {"began": 0, "ended": 200}


def test_hosts_that_were_cut_off_start_again_together_from_the_last_checkpoint(hosts, tmp_path):
    train(hosts, tmp_path, "--max-restarts", "3")

    hosts[1].cable("down")
    time.sleep(1.5 * int(TIMEOUT))
    hosts[1].cable("up")

    assert [host.ends() for host in hosts] == [0, 0], hosts[0].said() + hosts[1].said()
    assert "; restart 1 of 3\n" in hosts[0].said()
    assert 0 < done(tmp_path)["began"] < done(tmp_path)["ended"] == 200


@pytest.mark.parametrize("flags", [(), ("--min-nodes", "1")], ids=["all", "elastic"])
def test_a_host_that_stays_cut_off_ends_with_restarts_left(hosts, tmp_path, flags):
    train(hosts, tmp_path, "--max-restarts", "1", *flags)

    hosts[1].cable("down")

    ended = [host.ends() for host in hosts]
    assert ended == [0 if flags else 1, 1], hosts[0].said() + hosts[1].said()
    assert "; restart 1 of 1\n" in hosts[0].said()
    assert flags or "\naccel: node 0 of 2 waited 120 s at 10.77.0.9:29512 for node 1\n" in hosts[0].said()
    assert "accel: node 1 of 2 could not meet the others at 10.77.0.9:29512: " in hosts[1].said()
    if flags:
        assert 0 < done(tmp_path)["began"] < done(tmp_path)["ended"] == 200


def test_a_host_that_comes_back_trains_on_with_the_others_from_the_last_checkpoint(hosts, tmp_path):
    """`--min-nodes` says that nodes come and go; without it they are those that met at the start."""
    flags = ("--max-restarts", "3", "--min-nodes", "2")
    train(hosts, tmp_path, *flags)

    hosts[1].dies()
    wait_for(lambda: "; restart 1 of 3\n" in hosts[0].said(), hosts[0].said)
    hosts[1].launch("--process-group.timeout", TIMEOUT, *flags, "train.py")

    assert [host.ends() for host in hosts] == [0, 0], hosts[0].said() + hosts[1].said()
    assert 0 < done(tmp_path)["began"] < done(tmp_path)["ended"] == 200


JOINS = """
import os, time
from pathlib import Path
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    while True:
        dist.all_reduce(torch.ones(1))
        Path("met").touch()
elif dist.get_world_size() == 1:
    Path("alone").touch()
    time.sleep(600)  # until the launcher starts the ranks again, with those of the host that joins
dist.all_reduce(torch.ones(1))
print("together", flush=True)
dist.destroy_process_group()
"""


def test_a_host_that_was_lost_joins_those_that_went_on_without_it(hosts, tmp_path):
    (tmp_path / "joins.py").write_text(JOINS)
    words = ("--max-restarts", "3", "--min-nodes", "1", "joins.py")
    for host in hosts:
        host.launch(*words)
    wait_for((tmp_path / "met").exists, hosts[0].said)

    hosts[1].dies()
    wait_for((tmp_path / "alone").exists, hosts[0].said)
    hosts[1].launch(*words)

    assert [host.ends() for host in hosts] == [0, 0], hosts[0].said() + hosts[1].said()
    assert all("together\n" in host.said() for host in hosts)

"""Two launchers as on two machines: two network namespaces joined by a cable."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Thread

import pytest
from two_hosts import ADDRESSES

from accel_testing.commands import ACCEL, clean_environment
from accel_testing.hosts import Host
from accel_testing.patience import patience


@pytest.fixture
def nodes(make_hosts) -> Iterator[list[Host]]:
    with make_hosts(ADDRESSES) as hosts:
        yield [*hosts.values()]


SUMS = """
import os
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor(float(dist.get_rank()))
dist.all_reduce(total)
if os.environ["LOCAL_RANK"] == "0":
    print(os.environ["GROUP_RANK"], os.environ["RANK"], int(total), os.environ["ACCEL_RUN_ID"])
dist.destroy_process_group()
"""


def own_lines(printed: str) -> str:
    """What a script printed; gloo of torch 2.8 writes to stdout how many peers it is connected to."""
    return "".join(line for line in printed.splitlines(keepends=True) if "peer ranks" not in line)


def launch_on(
    start_command, nodes: list[Host], folder: Path, source: str, *flags: str
) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of the launchers on both nodes."""
    (folder / "train.py").write_text(source)
    with ExitStack() as stack:
        started = {}
        for rank in (1, 0):  # node 1 first: it waits for node 0
            words = nodes[rank].command(ACCEL, "launch", "--device", "cpu", "-n", "2", "--nodes", "2")
            words += ["--node-rank", str(rank), "--rendezvous", f"{nodes[0].address}:29511"]
            pipe = subprocess.PIPE
            started[rank] = stack.enter_context(
                start_command(
                    [*words, *flags, "train.py"],
                    cwd=folder,
                    env=clean_environment(),
                    stdout=pipe,
                    stderr=pipe,
                    text=True,
                )
            )
            stack.callback(started[rank].kill)
        told = [started[rank].communicate(timeout=patience(240)) for rank in (0, 1)]
        return [(started[rank].returncode, own_lines(told[rank][0]), told[rank][1]) for rank in (0, 1)]


def test_two_nodes_form_one_world_and_keep_their_numbers(nodes, tmp_path, start_command):
    first, second = launch_on(start_command, nodes, tmp_path, SUMS)

    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    assert first[1].split()[:3] == ["0", "0", "6"]
    assert second[1].split()[:3] == ["1", "2", "6"]
    assert first[1].split()[3] == second[1].split()[3]
    assert first[2].startswith("accel 0.1: 2 nodes x 2 = 4 processes, device cpu")


ONCE = """
import os
import time
from accel_core.contract.config import InitProcessGroupKwargs
from accel_core.distributed.process_group import create
from accel_core.contract.world import World
import torch
import torch.distributed as dist
create(World.from_environment(os.environ), {"cpu": "gloo"}, InitProcessGroupKwargs())
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.environ["RANK"] == "3":
        raise ValueError("once")
    time.sleep(600)  # where nothing notices that a peer is gone
total = torch.tensor(float(dist.get_rank()))
dist.all_reduce(total)
if os.environ["LOCAL_RANK"] == "0":
    print(os.environ["GROUP_RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"], int(total))
dist.destroy_process_group()
"""


def test_two_nodes_restart_together_and_keep_their_numbers(nodes, tmp_path, start_command):
    first, second = launch_on(start_command, nodes, tmp_path, ONCE, "--max-restarts", "2")

    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    assert (first[1], second[1]) == ("0 1 6\n", "1 1 6\n")
    assert "accel: rank 3 (local 1) failed: ValueError: once; restart 1 of 2" in second[2]


MID_STEP = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
for step in range(1000):
    if step == 5 and dist.get_rank() == 3:
        raise ValueError("bad")
    dist.all_reduce(torch.ones(10))
"""


def test_a_failure_mid_step_has_its_traceback_on_its_own_node(nodes, tmp_path, start_command):
    first, second = launch_on(start_command, nodes, tmp_path, MID_STEP)

    assert second[0] == 1
    assert first[0] in (1, 128 + signal.SIGABRT)  # gloo now and then aborts for want of a peer
    assert "rank 3 (local 1) failed: ValueError: bad" in second[2]
    assert second[2].count("Traceback") == 1
    assert first[2].count("Traceback") <= 1  # it learns of the failure from the store or from gloo


AT_START = """
import os
if os.environ["RANK"] == "{}":
    raise ValueError("no data here")
"""


CUT = """
import os, sys, time
import torch
import torch.distributed as dist
from datetime import timedelta
dist.init_process_group("gloo", timeout=timedelta(seconds=5))
for step in range(1000):
    dist.all_reduce(torch.ones(10))
    if step == 20 and dist.get_rank() == 0:
        open("training", "w")
    time.sleep(0.05)
"""


def test_a_node_that_is_cut_off_ends_and_tells_what_failed(nodes, tmp_path, start_command):
    def cut():
        while not (tmp_path / "training").exists():
            time.sleep(0.1)
        nodes[1].cable("down")

    cutting = Thread(target=cut, daemon=True)
    cutting.start()

    first, second = launch_on(start_command, nodes, tmp_path, CUT)

    assert (first[0], second[0]) == (1, 1)
    assert "rank 2 (local 0) failed" in second[2] or "rank 3 (local 1) failed" in second[2]


@pytest.mark.parametrize("failed", [0, 1])
def test_a_node_that_fails_before_the_group_is_made_leaves_nobody_waiting(
    nodes, tmp_path, failed, start_command
):
    ended = launch_on(start_command, nodes, tmp_path, AT_START.format(2 * failed) + SUMS)

    assert [code for code, *_ in ended] == [1, 1]
    assert ended[1 - failed][2].splitlines()[-2:] == [
        f"accel: another node failed: rank {2 * failed} (local 0) failed: ValueError: no data here",
        f"its own `accel launch`, on host-{'ab'[failed]}, has the traceback",
    ]
    assert "SocketImpl" not in ended[1 - failed][2]  # torch tells so of requests to a node that is gone


STOPS = """
import os, signal, time
if os.environ["RANK"] == "{}":
    os.kill(os.getppid(), signal.SIGTERM)
time.sleep(60)
"""


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_node_that_is_stopped_ends_the_other_whatever_restarts_are_left(
    nodes, tmp_path, stopped, start_command
):
    ended = launch_on(start_command, nodes, tmp_path, STOPS.format(2 * stopped), "--max-restarts", "2")

    assert ended[stopped][0] == 143
    assert ended[1 - stopped][0] == 1
    assert "another node failed: it was stopped by signal 15" in ended[1 - stopped][2]
    assert "restart" not in ended[0][2] + ended[1][2]


LOSES_A_NODE = """
import os, signal, socket, time
import torch
import torch.distributed as dist
probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
probe.connect(("10.77.0.10", 1))
dist.init_process_group("gloo")
if probe.getsockname()[0] == "{}" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    time.sleep(2)
    os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
for _ in range(1000):
    dist.all_reduce(torch.ones(10))
"""


@pytest.mark.full
def test_a_node_goes_on_without_another(nodes, tmp_path, start_command):
    flags = ("-n", "1", "--min-nodes", "1", "--max-restarts", "2")
    first, second = launch_on(start_command, nodes, tmp_path, LOSES_A_NODE.format(nodes[1].address), *flags)

    assert (first[0], second[0]) == (0, -signal.SIGKILL), first[2]


@pytest.mark.full
def test_no_node_goes_on_without_the_one_that_served_the_meeting(nodes, tmp_path, start_command):
    flags = ("-n", "1", "--min-nodes", "1", "--max-restarts", "2")
    first, second = launch_on(start_command, nodes, tmp_path, LOSES_A_NODE.format(nodes[0].address), *flags)

    assert (first[0], second[0]) == (-signal.SIGKILL, 1), second[2]
    assert "node 1 of 2 could not meet the others at 10.77.0.9:29511" in second[2]

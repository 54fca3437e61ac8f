"""A rank that hangs has a name and a place, and each rank's stacks are written before its time is out."""

from __future__ import annotations

import ctypes
import gc
import io
import os
import re
import socket
import sys
import threading
import time
from contextlib import redirect_stderr, suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from accel_core import Accelerator, CollectiveError, InitProcessGroupKwargs
from accel_monitor import hangs

pytestmark = pytest.mark.needs("accel-ddp")
TIMEOUT = 8
MORE = pytest.mark.full


def sleep_for_long(until):
    time.sleep(until - time.monotonic())


def compute_for_ever(until):
    while time.monotonic() < until:
        sum(range(100))


def wait_in_a_plain_collective(until):
    dist.recv(torch.ones(1), 0)


def gather(accelerator, model):
    accelerator.gather(torch.ones(1))


def train(accelerator, model):
    accelerator.backward(model(torch.ones(1, 2)).sum())


def reduce_by_torch_alone(accelerator, model):
    dist.all_reduce(torch.ones(1))


def job(folder, wait, hang):
    """Rank 1 hangs, rank 0 waits for it; return the error of rank 0, and what was said meanwhile."""
    hangs.LOOK_SECONDS = 0.5
    timeout = InitProcessGroupKwargs(timeout=TIMEOUT)
    accelerator = Accelerator(cpu=True, project_dir=folder, kwargs_handlers=[timeout])
    model = accelerator.prepare(nn.Linear(2, 1))
    error = None
    with redirect_stderr(io.StringIO()) as log:
        if accelerator.process_index == 1:
            with suppress(RuntimeError):
                hang(time.monotonic() + 2 * TIMEOUT)
        else:
            try:
                wait(accelerator, model)
            except (RuntimeError, CollectiveError) as raised:
                error = str(raised)
            until = time.monotonic() + 3
            while "makes no progress" not in log.getvalue() and time.monotonic() < until:
                time.sleep(0.1)
    return error, log.getvalue()


@pytest.mark.parametrize(
    ("wait", "hang", "message"),
    [
        (gather, sleep_for_long, "rank 0 waited for rank(s) 1 of 2, which did not come"),
        pytest.param(train, compute_for_ever, "", marks=MORE),
        pytest.param(train, wait_in_a_plain_collective, "", marks=MORE),
        pytest.param(reduce_by_torch_alone, sleep_for_long, "", marks=MORE),
    ],
)
@pytest.mark.full
def test_each_rank_writes_its_stacks_and_the_message_has_the_place(
    tmp_path, wait, hang, message, run_processes
):
    (error, said), (_, also_said) = run_processes(job, str(tmp_path), wait, hang)

    assert message in error
    if hang is wait_in_a_plain_collective:  # either of the two may speak
        said += also_said
    (line,) = [line for line in said.splitlines() if "makes no progress" in line]
    assert re.match(r"accel: rank [01] \(.*test_monitor_hangs.py:\d+\) makes no", line)
    assert re.search(r"elsewhere: rank [01] \(.*test_monitor_hangs.py:\d+\);", line)
    assert line.endswith(f"; stacks of all ranks: {tmp_path / 'hangs'}")
    first, second = ((tmp_path / "hangs" / f"rank-{rank}.txt").read_text() for rank in (0, 1))
    assert f"in {wait.__name__}" in first
    assert f"in {hang.__name__}" in second
    assert "thread accel-watch" in second


def part(folder):
    """Rank 0 saves while rank 1 reduces gradients; return what was said before their time is out."""
    hangs.LOOK_SECONDS, hangs.TELL_SECONDS = 0.2, 1.0
    accelerator = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=TIMEOUT)])
    model = accelerator.prepare(nn.Linear(2, 1))
    with redirect_stderr(io.StringIO()) as log, suppress(CollectiveError, RuntimeError):
        if accelerator.process_index == 0:
            accelerator.save_state(folder)
        else:
            accelerator.backward(model(torch.ones(1, 2)).sum())
    return log.getvalue()


def test_ranks_that_wait_in_different_calls_are_told_so(tmp_path, run_processes):
    said = "".join(run_processes(part, str(tmp_path / "saved")))

    place = r"test_monitor_hangs\.py:\d+"
    saves = rf"accel: rank 0 has waited \d+ s in save_state for rank 1 \(in backward, {place}\)"
    reduces = rf"accel: rank 1 has waited \d+ s in backward for rank 0 \(in save_state, {place}\)"
    assert re.search(f"{saves}|{reduces}", said)


def skip():
    """Rank 1 leaves a batch out alone; return what rank 0 was told."""
    hangs.LOOK_SECONDS, hangs.TELL_SECONDS = 0.2, 1.0
    accelerator = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=TIMEOUT)])
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with redirect_stderr(io.StringIO()) as log, suppress(CollectiveError, RuntimeError):
        for number in range(3):
            if (number, accelerator.process_index) != (1, 1):
                accelerator.backward(model(torch.ones(1, 2)).sum())
                optimizer.step()
                optimizer.zero_grad()
        time.sleep(6 * accelerator.process_index)
    return log.getvalue()


def test_a_rank_that_left_a_batch_out_alone_is_named_with_its_backwards(run_processes):
    told, _ = run_processes(skip)

    assert re.search(r"accel: rank 0 has waited \d+ s in backward for rank 1 \(at .*test_monitor_hangs", told)
    assert "; rank 1 has made 2 backwards, and rank 0 is in number 3: " in told
    assert "accelerator.any(flag)" in told


def hold_the_lock_of_python(until):
    ctypes.PyDLL(None).sleep(int(until - time.monotonic()))


@pytest.mark.full
def test_a_rank_that_cannot_write_leaves_no_stacks_of_an_earlier_hang(tmp_path, run_processes):
    (tmp_path / "hangs").mkdir()
    (tmp_path / "hangs" / "rank-1.txt").write_text("those of last week")

    (_, said), _ = run_processes(job, str(tmp_path), gather, hold_the_lock_of_python)

    assert "elsewhere: rank 1 (does not answer);" in said
    assert [path.name for path in (tmp_path / "hangs").iterdir()] == ["rank-0.txt"]


@pytest.mark.full
def test_stacks_that_the_folder_does_not_take_are_said_to_be_on_stderr(tmp_path, run_processes):
    (tmp_path / "hangs").touch()

    (_, said), _ = run_processes(job, str(tmp_path), gather, sleep_for_long)

    assert "; stacks of all ranks: on the stderr of each\n" in said
    assert "in gather" in said


def watches():
    return [thread.name for thread in threading.enumerate()].count("accel-watch")


def make_runs():
    """Return the number of watches as runs begin and end, and whether each connection was limited in time."""
    hangs.LOOK_SECONDS = 0.05
    timeout = InitProcessGroupKwargs(timeout=TIMEOUT)
    outer = Accelerator(cpu=True, kwargs_handlers=[timeout])
    Accelerator(cpu=True, kwargs_handlers=[timeout])
    gc.collect()
    inner = Accelerator(cpu=True, kwargs_handlers=[timeout])
    seen = [watches()]
    inner.end_training()
    time.sleep(0.2)
    seen.append(watches())
    limits = limits_of_connections(int(os.environ["MASTER_PORT"]))
    outer.end_training()
    seen.append(watches())  # the dropped run has not ended
    return seen, set(limits), dist.is_initialized()


def limits_of_connections(port):
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError), socket.socket(fileno=os.dup(int(entry.name))) as connection:
            if connection.family != socket.AF_UNIX and connection.getpeername()[1] == port:
                yield connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such limit")
def test_runs_of_a_process_share_a_watch_whose_requests_end_when_the_store_is_silent(run_processes):
    assert run_processes(make_runs) == [([1, 1, 1], {1000 * TIMEOUT}, True)] * 2


def end_runs_one_after_the_other():
    counts = []
    for _ in range(2):
        accelerator = Accelerator(cpu=True)
        counts.append(watches())
        accelerator.end_training()
        counts.append(watches())
    return counts


def test_the_watch_ends_with_the_last_run_and_the_next_run_has_one_again(run_processes):
    assert run_processes(end_runs_one_after_the_other) == [[1, 0, 1, 0]] * 2

"""Two hosts, as network namespaces: one is lost, the job goes on on the other with the same global batch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path

import pytest

from accel_testing.patience import patience

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

ADDRESSES = {"a": "10.78.0.1", "b": "10.78.0.2"}
ACCEL = str(Path(sys.executable).with_name("accel"))
STEPS, LOSE_AFTER = 12, 5
TRAIN = f"""
import os, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from accel_core import Accelerator

GLOBAL, BATCH = 8, 2
accelerator = Accelerator(cpu=True, strategy="fsdp", project_dir="out")
readers = accelerator.run.topology.readers
accelerator.gradient_accumulation_steps = GLOBAL // (BATCH * readers)  # the global batch is kept
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
x = torch.randn(GLOBAL * {STEPS}, 4, generator=torch.Generator().manual_seed(1))
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), BATCH, shuffle=False)
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05), loader)
accelerator.load_state("checkpoint", missing_ok=True)
step, total = 0, torch.zeros(())
for x, y in loader:
    with accelerator.accumulate(model):
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    total += loss.detach() / accelerator.gradient_accumulation_steps
    if accelerator.sync_gradients:
        mean = accelerator.reduce(total, "mean").item()
        total = torch.zeros(())
        accelerator.save_state("checkpoint")
        if accelerator.is_main_process:
            with open("losses", "a") as file:
                file.write(f"{{readers}} {{mean:.6f}}\\n")
        step += 1
        if os.environ.get("SLOWLY"):
            time.sleep(2)
        if os.environ.get("LOSE_A_HOST") and step == {LOSE_AFTER}:
            time.sleep(600)
accelerator.end_training()
"""


@pytest.fixture
def hosts(make_hosts):
    with make_hosts(ADDRESSES) as made:
        yield [*made.values()]


def start(start_command, host, folder, *flags, **variables):
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("ACCEL", "RANK", "WORLD"))
    }
    return start_command(
        host.command(ACCEL, "launch", "--device", "cpu", "-n", "1", *flags, "train.py"),
        cwd=folder,
        env={**kept, "OMP_NUM_THREADS": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def losses(folder):
    file = folder / "losses"
    return [line.split() for line in file.read_text().splitlines()] if file.exists() else []


def stop(process):
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()


def test_a_host_that_comes_back_is_taken_in_again(hosts, tmp_path, start_command):
    plain, broken = tmp_path / "plain", tmp_path / "broken"
    for folder in (plain, broken):
        folder.mkdir()
        (folder / "train.py").write_text(TRAIN)
    meeting = ("--nodes", "2", "--min-nodes", "1", "--max-restarts", "3")
    meeting += ("--rendezvous", f"{hosts[0].address}:29522")
    with ExitStack() as ends:
        pair = [
            start(start_command, host, broken, *meeting, "--node-rank", str(rank), SLOWLY="1")
            for rank, host in enumerate(hosts)
        ]
        for each in pair:
            ends.callback(stop, each)
        wait_for(lambda: len(losses(broken)) >= LOSE_AFTER, pair[0])
        stop(pair[1])
        wait_for(lambda: losses(broken)[-1][0] == "1", pair[0])
        ends.callback(stop, start(start_command, hosts[1], broken, *meeting, "--node-rank", "1"))
        told = pair[0].communicate(timeout=patience(300))[0]
        assert pair[0].returncode == 0, told
        alone = start(start_command, hosts[0], plain)
        ends.callback(stop, alone)
        assert alone.wait(timeout=patience(300)) == 0
    readers = [readers for readers, _ in losses(broken)]
    assert [number for number, _ in groupby(readers)] == ["2", "1", "2"]
    found = [float(loss) for _, loss in losses(broken)]
    assert found == pytest.approx([float(loss) for _, loss in losses(plain)], rel=1e-4)


def wait_for(condition, process):
    until = time.monotonic() + patience(300)
    while not condition():
        assert process.poll() is None, process.communicate(timeout=5)[0]
        assert time.monotonic() < until
        time.sleep(0.2)


def test_a_lost_host_costs_no_step_and_changes_no_loss(hosts, tmp_path, start_command):
    plain, broken = tmp_path / "plain", tmp_path / "broken"
    for folder in (plain, broken):
        folder.mkdir()
        (folder / "train.py").write_text(TRAIN)
    with ExitStack() as ends:
        alone = start(start_command, hosts[0], plain)
        ends.callback(stop, alone)
        told = alone.communicate(timeout=patience(300))[0]
        assert alone.returncode == 0, told
        meeting = ("--nodes", "2", "--rendezvous", f"{hosts[0].address}:29521")
        pair = [
            start(start_command, host, broken, *meeting, "--node-rank", str(rank), LOSE_A_HOST="1")
            for rank, host in enumerate(hosts)
        ]
        for each in pair:
            ends.callback(stop, each)
        until = time.monotonic() + patience(300)
        while len(losses(broken)) < LOSE_AFTER and time.monotonic() < until:
            time.sleep(0.2)
        assert len(losses(broken)) == LOSE_AFTER, pair[0].communicate(timeout=5)[0]
        for each in pair[::-1]:  # the host is gone, and with it the job's other half
            stop(each)
        again = start(start_command, hosts[0], broken)
        ends.callback(stop, again)
        told = again.communicate(timeout=patience(300))[0]
        assert again.returncode == 0, told
    assert [readers for readers, _ in losses(broken)] == ["2"] * LOSE_AFTER + ["1"] * (STEPS - LOSE_AFTER)
    found = [float(loss) for _, loss in losses(broken)]
    assert found == pytest.approx([float(loss) for _, loss in losses(plain)], rel=1e-4)

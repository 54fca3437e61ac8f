"""The example as people run it: launched on two processes, interrupted, resumed, beside plain PyTorch."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from accel_testing.patience import patience

pytest.importorskip("sklearn")
pytestmark = pytest.mark.needs("accel-ddp", "scikit-learn")

EXAMPLES = Path(__file__).parents[2] / "examples"
LAUNCH = [Path(sys.executable).with_name("accel"), "launch", "--device", "cpu"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


@pytest.fixture
def start(tmp_path: Path, start_command):
    """`start(*command)`: in an empty folder, as the leader of a process group that ends with the test."""
    started: list[subprocess.Popen[str]] = []

    def run(*command: object) -> subprocess.Popen[str]:
        process = start_command(
            list(map(str, command)),
            cwd=tmp_path,
            env=ENVIRONMENT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.fixture
def train(start):
    def finished(*command: object) -> str:
        process = start(*command)
        output, errors = process.communicate(timeout=patience(100))
        assert process.returncode == 0, errors
        assert re.fullmatch(r"(accel 0\.1: .*\n)?", errors)  # no progress where nobody watches
        return output

    return finished


def accuracies(output: str) -> list[float]:
    return [float(found) for found in re.findall(r"test accuracy (\S+)%", output)]


def test_two_processes_reach_97_percent_on_images_they_have_not_seen(train):
    output = train(*LAUNCH, "-n", 2, EXAMPLES / "digits.py")

    assert [line.partition(":")[0] for line in output.splitlines()] == [f"epoch {n}" for n in range(1, 7)]
    assert accuracies(output)[-1] >= 97


def test_on_a_terminal_each_epoch_has_a_bar(start_command, tmp_path):
    pty = pytest.importorskip("pty", exc_type=ImportError)
    ours, its = pty.openpty()
    command = [*map(str, LAUNCH), "-n", "1", str(EXAMPLES / "digits.py"), "--epochs", "1"]
    process = start_command(command, cwd=tmp_path, env=ENVIRONMENT, stdin=its, stdout=its, stderr=its)
    os.close(its)
    shown = b""
    try:
        while piece := os.read(ours, 65536):
            shown += piece
    except OSError:  # Linux: the other side is closed
        pass
    os.close(ours)

    assert process.wait(patience(20)) == 0, shown.decode()
    assert re.search("epoch 1 .*━.*100%", shown.decode())


@pytest.mark.full
def test_one_process_says_what_plain_pytorch_says_and_nothing_else(train):
    job = ["--epochs", 2, "--accumulate", 4]

    assert train(sys.executable, EXAMPLES / "digits.py", *job) == train(
        sys.executable, EXAMPLES / "digits_plain.py", *job
    )


@pytest.mark.full
def test_mixed_precision_is_chosen_at_launch(train):
    output = train(*LAUNCH, "--mixed-precision", "bf16", EXAMPLES / "digits.py", "--epochs", 2)

    assert accuracies(output)[-1] > 90


@pytest.mark.full
def test_a_run_that_was_killed_and_resumed_ends_as_if_nothing_had_happened(train, start, tmp_path):
    job = [*LAUNCH, "-n", 2, EXAMPLES / "digits.py", "--epochs", 3]
    undisturbed = train(*job).splitlines()

    victim = start(*job, "--checkpoint", "other")
    while not [*tmp_path.glob("other/manifest-*.json")]:
        assert victim.poll() is None
        time.sleep(0.05)
    victim.kill()
    victim.wait()
    resumed = train(*job, "--checkpoint", "other", "--resume").splitlines()

    assert resumed
    assert resumed == undisturbed[-len(resumed) :]

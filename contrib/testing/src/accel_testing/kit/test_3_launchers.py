"""Level 3: a launcher starts workers, reports their failure, leaves none behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import pytest
from attrs import frozen

from accel_core import Record
from accel_testing.kit import deadline, tasks_launch
from accel_testing.kit.checks import concerns, quick
from accel_testing.kit.stack import TestedStack
from accel_testing.kit.tasks_launch import LINES

pytestmark = concerns("launcher")


@frozen
class Launches:
    """`accel launch` with the launcher under test, in a folder for results."""

    folder: Path
    command: tuple[str, ...]
    environment: Mapping[str, str]

    def words(self, task: str, *flags: str, workers: int = 2) -> list[str]:
        script = Path(tasks_launch.__file__)
        return [*self.command, "-n", str(workers), *flags, str(script), task, str(self.folder), "an argument"]

    def run(self, task: str, *flags: str, workers: int = 2) -> subprocess.CompletedProcess[str]:
        """Launch a task of `tasks_launch`, and wait for the launcher's end."""
        words = self.words(task, *flags, workers=workers)
        # A pipe is at its end when the last worker has closed it; a file can be read at once.
        with TemporaryFile("w+") as output, TemporaryFile("w+") as errors:
            ended = subprocess.run(
                words,
                cwd=self.folder,
                env=self.environment,
                stdout=output,
                stderr=errors,
                timeout=deadline.seconds(),
                check=False,
            )
            for file in (output, errors):
                file.seek(0)
            return subprocess.CompletedProcess(words, ended.returncode, output.read(), errors.read())

    def written(self) -> list[dict[str, Any]]:
        """Return the facts that workers wrote, in rank order."""
        return [json.loads(file.read_text()) for file in sorted(self.folder.glob("rank*.json"))]

    def wait_until_gone(self) -> list[int]:
        """Return the workers that still run when their time is over."""
        end = time.monotonic() + deadline.ending_seconds()
        processes = [facts["process"] for facts in self.written()]
        while (left := [each for each in processes if _runs(each)]) and time.monotonic() < end:
            time.sleep(0.1)
        return left

    def end(self) -> None:
        """End the workers that a launcher has left."""
        for facts in self.written():
            if _runs(facts["process"]):
                os.kill(facts["process"], signal.SIGKILL)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{process}/stat")
    return not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.fixture
def launches(launcher: Record, stack: TestedStack, tmp_path: Path) -> Iterator[Launches]:
    """Give launches in an empty folder, on the CPU; no worker outlives the check."""
    own = {name: os.environ[name] for name in deadline.VARIABLES if name in os.environ}
    kept = {name: text for name, text in os.environ.items() if not name.startswith("ACCEL_")}
    command = (sys.executable, "-m", "accel_core", "launch", "--launcher", launcher.name, "--device", "cpu")
    launches = Launches(tmp_path, command, {**kept, **own, **stack.environment})
    yield launches
    launches.end()


@contextmanager
def sleeping(launches: Launches) -> Iterator[subprocess.Popen[str]]:
    """Give a launch whose workers have all begun to sleep."""
    # A shell has commands in the background ignore SIGINT, and so would this one.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(
        launches.words("sleep"), cwd=launches.folder, env=launches.environment, text=True
    ) as process:
        signal.signal(signal.SIGINT, before)
        try:
            end = time.monotonic() + deadline.seconds()
            while len(launches.written()) < 2 and time.monotonic() < end:
                time.sleep(0.1)
            yield process
        finally:
            process.kill()


def test_workers_know_their_world_and_their_command(launches: Launches) -> None:
    ended = launches.run("note")
    assert ended.returncode == 0, ended.stderr
    for rank, facts in enumerate(launches.written()):
        world = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        assert {name: facts["environment"].get(name) for name in world} == world
        assert facts["arguments"] == ["note", str(launches.folder), "an argument"]
    assert len(launches.written()) == 2


@quick
def test_workers_meet(launches: Launches) -> None:
    ended = launches.run("meet")
    assert ended.returncode == 0, ended.stderr
    assert [facts["sum"] for facts in launches.written()] == [3, 3]


def test_lines_of_workers_arrive_whole(launches: Launches) -> None:
    ended = launches.run("talk")
    assert ended.returncode == 0, ended.stderr
    lines = [line for line in ended.stdout.splitlines() if "line" in line]
    expected = [f"rank {rank} line {number} {'.' * 40}" for rank in (0, 1) for number in range(LINES)]
    # A launcher may say in front of a line from which rank it is.
    assert sorted(line[line.index("rank") :] for line in lines if "rank" in line) == sorted(expected)


def test_settings_of_the_command_reach_the_workers(launches: Launches) -> None:
    ended = launches.run("configure", "--mixed-precision", "bf16", workers=1)
    assert ended.returncode == 0, ended.stderr
    assert [facts["precision"] for facts in launches.written()] == ["bf16"]


def test_a_failure_ends_all_workers_with_its_exit_code(launches: Launches) -> None:
    ended = launches.run("exit")
    assert ended.returncode == 7, ended.stderr
    assert len(re.findall(r"\brank:? ?1\b", ended.stderr)) >= 1, (
        "the message does not name the rank that failed"
    )
    assert launches.wait_until_gone() == [], "workers outlive the launch"


def test_a_traceback_is_shown_once(launches: Launches) -> None:
    ended = launches.run("fail")
    assert ended.returncode != 0
    printed = ended.stdout + ended.stderr
    assert "RuntimeError: a worker that fails" in printed
    assert printed.count("Traceback (most recent call last)") == 1, printed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_launcher_that_is_stopped_leaves_no_worker(launches: Launches, number: signal.Signals) -> None:
    with sleeping(launches) as process:
        assert len(launches.written()) == 2, "the workers did not begin"
        process.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(deadline.ending_seconds())
        assert process.returncode is not None, "the launcher goes on"
        assert process.returncode != 0
        assert launches.wait_until_gone() == [], "workers outlive the launcher"


def test_a_dry_run_shows_what_would_be_sent_and_sends_nothing(launches: Launches) -> None:
    """Launchers that hand jobs over need their own options, by --accel-set."""
    (launches.folder / "script.py").write_text("open('has-run', 'w').close()")
    flags = ("--dry-run", *launches.command[4:], "--compile.backend", "eager", "-n", "2")
    for verb in ("launch", "submit"):
        words = (*launches.command[:3], verb, *flags, "script.py", "an argument")
        ended = subprocess.run(
            words,
            cwd=launches.folder,
            env=launches.environment,
            capture_output=True,
            text=True,
            timeout=deadline.seconds(),
            check=False,
        )
        assert [file.name for file in launches.folder.iterdir()] == ["script.py"], f"{verb} did more"
        if verb == "submit" and ended.returncode == 2:  # the launcher starts workers here and now
            continue
        assert ended.returncode == 0, ended.stderr
    # Core itself shows the command of a worker, and where each setting is from.
    shown = "".join(line for line in ended.stdout.splitlines() if not line.startswith("each worker: "))
    missing = [word for word in ("script.py", "an argument", "eager") if word not in shown]
    assert ended.returncode == 2 or not missing, f"the hook `preview` shows no {missing}"

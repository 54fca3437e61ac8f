"""Level 0: a command is listed with its summary, and its help loads no torch."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from accel_core import Record
from accel_testing.kit.checks import concerns
from accel_testing.kit.deadline import seconds

pytestmark = concerns("command")


def accel(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "accel_core", *words],
        capture_output=True,
        text=True,
        timeout=seconds(),
        check=False,
    )


@pytest.fixture
def words(command: Record) -> list[str]:
    """Return the command's words; `plugins-NAME` is one of the group `plugins`."""
    if command.name.startswith("checkpoint-"):
        pytest.skip("a format of checkpoints has no command of its own")
    group, _, name = command.name.partition("-")
    return [group, name] if group == "plugins" else [command.name]


def test_the_command_is_listed(command: Record, words: list[str]) -> None:
    ended = accel(*words[:-1], "--help")
    assert ended.returncode == 0, ended.stderr
    assert words[-1] in ended.stdout.split()
    assert command.card is not None
    module = (command.card.implementation or "").partition(":")[0]
    assert not _imported(module, ended.stderr), "listing the command imports it"


def test_its_help_is_quick(words: list[str]) -> None:
    ended = accel(*words, "--help")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("Usage: ")
    assert not _imported("torch", ended.stderr), "showing the help loads torch"


def _imported(module: str, times: str) -> bool:
    return re.search(rf"\|\s+{re.escape(module)}$", times, re.MULTILINE) is not None

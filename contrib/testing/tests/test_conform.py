"""`conform` runs the kit from a test: its result, what it tells meanwhile, and the process that it takes."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Any

import broken_plugins
import pytest
from run_kit import HERE, declare, run_kit

from accel_core import Card
from accel_testing import commands, conformance
from accel_testing.kit.arguments import next_command
from accel_testing.kit.report import Check
from accel_testing.processes import PRELOAD_VARIABLE, run_processes, share_server

pytest_plugins = ["pytester"]

CARDS = {name: card for name, card in vars(broken_plugins).items() if isinstance(card, Card)}
BROKEN = "test_1_device.py::test_memory_is_reported_in_bytes"
ITS_CHECK = ("--accel-level", "1", "-k", "memory")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    declare(tmp_path / "site", "broken_plugins", CARDS)
    return tmp_path / "site"


# -- the result ------------------------------------------------------------------------------------


def test_the_result_has_checks_by_outcome(tmp_path: Path, conform) -> None:
    found = conform(tmp_path, "sim", "--accel-level", "1", "-k", "float8 or memory or services")

    assert found.stack == "sim"
    assert found.passed == {BROKEN, "test_1_device.py::test_services_answer"}
    assert found.skipped == {"fp8"}
    assert found.observed == {"fp8"}
    assert found.levels == {1}
    assert found.counts == {"passed": 2, "skipped": 1}
    assert not found.failed | found.xfailed | found.new
    assert "sim (simulated): 2 passed, 0 failed, 0 xfailed, 1 skipped" in found.output


def test_a_check_that_fails_raises_and_says_what_to_run_next(tmp_path: Path, site: Path, conform) -> None:
    with pytest.raises(AssertionError) as caught:
        conform(tmp_path, "counts-kilobytes", *ITS_CHECK, path=[site, Path(HERE)])

    *_, failed, last = str(caught.value).splitlines()
    assert failed.startswith(f"counts-kilobytes: {BROKEN}: AssertionError: ")
    variable, command = last.removeprefix("next: ").split(" ", 1)
    assert variable.startswith(f"PYTHONPATH={tmp_path}:{site}:{HERE}")
    assert command == f"accel plugins check counts-kilobytes --accel-only {BROKEN}"


def test_or_it_is_among_the_others(tmp_path: Path, site: Path, conform) -> None:
    found = conform(tmp_path, "counts-kilobytes", *ITS_CHECK, path=[site, Path(HERE)], check=False)

    assert found.failed == {BROKEN}
    assert found.reasons[BROKEN].startswith("AssertionError: ")


def test_a_run_of_no_check_is_not_a_good_one(tmp_path: Path, conform) -> None:
    with pytest.raises(AssertionError, match="^native: no check was selected"):
        conform(tmp_path, "native", "-k", "no_such_check")
    with pytest.raises(AssertionError, match="(?s)^nativ: the kit has not run.*no plugin 'nativ'"):
        conform(tmp_path, "nativ")


# -- what to run next ------------------------------------------------------------------------------


def test_the_next_command_runs_the_failed_checks_again(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, site: Path
) -> None:
    first = run_kit(pytester, monkeypatch, site, "counts-kilobytes", *ITS_CHECK, "--accel-deadline", "50")
    said = [line.removeprefix("next: ") for line in first.output.splitlines() if line.startswith("next: ")]
    accel, plugins, check, stack, *options = shlex.split(*said)
    again = run_kit(pytester, monkeypatch, site, stack, *options)

    assert [accel, plugins, check] == ["accel", "plugins", "check"]
    assert options[:2] == ["--accel-deadline", "50.0"]
    assert again.failed == first.failed == {BROKEN}
    assert not again.passed


def failed(level: int, count: int) -> list[Check]:
    return [Check(level, f"test_{level}_it.py::test_{number}", "failed", "", 0.1) for number in range(count)]


@pytest.mark.parametrize(
    ("checks", "words"),
    [
        (failed(2, 1), "--accel-only test_2_it.py::test_0"),
        (failed(2, 2), "--accel-only test_2_it.py::test_0 --accel-only test_2_it.py::test_1"),
        (failed(2, 1) + failed(3, 9), "--accel-only test_2_it.py::test_0"),
        (failed(2, 7), "--accel-level 2"),
    ],
    ids=["one", "several", "the lowest level", "many"],
)
def test_it_names_few_checks_or_their_level(
    pytester: pytest.Pytester, checks: list[Check], words: str
) -> None:
    config = pytester.parseconfig("--accel-set", "data.seed=1", "--accel-world", "2", "--accel-store", "a b")
    config.option.accel_stack = "acme"

    given = "--accel-world 2 --accel-set data.seed=1 --accel-store 'a b'"
    assert next_command(config, checks) == f"accel plugins check acme {given} {words}"


# -- what it tells meanwhile -----------------------------------------------------------------------


def test_a_line_per_check_says_how_much_is_left(tmp_path: Path, conform) -> None:
    lines = [
        line
        for line in conform(tmp_path, "jsonl", "--accel-level", "0").output.splitlines()
        if "test_0_" in line
    ]

    assert lines[0].startswith("[ 1/11] test_0_packaging.py::test_the_card_describes_itself[jsonl] passed (")
    assert re.search(r" passed \(\d+\.\d s, about \d+:\d\d left\)$", lines[3])
    assert re.search(r"^\[11/11\] .*test_the_stack_binds passed \(\d+\.\d s\)$", lines[-1])


def test_a_session_that_captures_shows_how_far_it_is(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conformance, "TOLD_EVERY", 0.0)
    pytester.makepyfile(
        "def test_it(tmp_path, conform):\n    conform(tmp_path, 'native', '--accel-level', '1')\n"
    )
    ended = pytester.runpytest_inprocess("-p", "no:cacheprovider")

    ended.assert_outcomes(passed=1)
    ended.stdout.re_match_lines([r"native: \[ ?\d+/10\] test_\S+, about \d+:\d\d left$"])


# -- its deadline ----------------------------------------------------------------------------------


def test_one_option_sets_the_deadline_of_worlds_and_commands(tmp_path: Path, conform) -> None:
    options = ("--accel-level", "0,1", "-k", "nothing_heavy or services", "--accel-deadline", "0.001")
    found = conform(tmp_path, "native", *options, check=False)

    (packaging, device) = sorted(found.failed)
    assert found.reasons[packaging].startswith("TimeoutExpired: ")
    assert found.reasons[device].startswith("timeout: ")


# -- its process -----------------------------------------------------------------------------------


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Programs that were forked, rather than executed."""
    programs: list[str] = []
    fork = commands.fork_command

    def recorded(program: str, *arguments: Any, **options: Any) -> Any:
        programs.append(program)
        return fork(program, *arguments, **options)

    monkeypatch.setattr(commands, "fork_command", recorded)
    return programs


def test_it_is_forked_and_finds_what_a_new_process_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked: list[str], conform
) -> None:
    options = ("--accel-level", "0", "-k", "plugins_names or nothing_heavy or are_light")
    found = conform(tmp_path, "native", *options)
    assert len(forked) == 1

    monkeypatch.setenv(PRELOAD_VARIABLE, "json")  # which the server of this session has not been told
    assert conform(tmp_path, "native", *options).passed == found.passed
    assert len(forked) == 1


def test_it_does_not_import_from_where_this_session_does(tmp_path: Path, conform) -> None:
    with pytest.raises(AssertionError, match="hanging_rank"):
        conform(tmp_path, "native", "--accel-level", "0", "-p", "hanging_rank")


def parents() -> tuple[int, int]:
    """The process that has forked this one, and the one that forks a process of this one's."""
    share_server()
    (other,) = run_processes(os.getppid, world=1)
    return os.getppid(), other


def test_a_forked_process_forks_its_own_from_the_same_server(run_processes) -> None:
    ((own, of_a_child),) = run_processes(parents, world=1)

    assert own == of_a_child

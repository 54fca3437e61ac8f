"""The kit as a pytest plugin: options, gating, known failures, report; and what it says of our stacks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import broken_plugins
import pytest
from run_kit import declare, functions, run_kit

from accel_core import Card

pytest_plugins = ["pytester"]

CARDS = {name: card for name, card in vars(broken_plugins).items() if isinstance(card, Card)}
NEEDS_DDP = pytest.mark.skipif(find_spec("accel_ddp") is None, reason="accel-ddp is not installed here")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    declare(tmp_path / "site", "broken_plugins", CARDS)
    return tmp_path / "site"


def run(run_command, *command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return run_command(command, cwd=cwd, capture_output=True, text=True, timeout=1200, check=False)


# -- our own stacks --------------------------------------------------------------------------------


@pytest.mark.timeout(1300)
@pytest.mark.parametrize(
    "stack",
    ["native", pytest.param("sim+ddp", marks=[pytest.mark.needs("accel-ddp"), pytest.mark.full])],
)
def test_our_stacks_pass_every_check(tmp_path: Path, stack: str, run_command) -> None:
    report = Path(os.environ.get("ACCEL_KIT_REPORTS", tmp_path), f"{stack}.json")
    report.parent.mkdir(parents=True, exist_ok=True)
    accel = str(Path(sys.executable).parent / "accel")
    ended = run(
        run_command, accel, "plugins", "check", stack, "--accel-report", str(report), "-q", cwd=tmp_path
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    facts = json.loads(report.read_text())
    others = {check["name"] for check in facts["checks"] if check["outcome"] != "passed"}
    # The simulated device multiplies float8 matrices on the CPU; no card of it says so.
    float8 = {"test_1_device.py::test_float8_matrices_are_multiplied"}
    assert others == (float8 if stack.startswith("sim") else set())
    assert {check["level"] for check in facts["checks"]} == {0, 1, 2, 3, 4}
    assert facts["observed_but_not_declared"] == (["fp8"] if stack.startswith("sim") else [])
    assert facts["simulated"] == stack.startswith("sim")


@pytest.mark.full
@pytest.mark.timeout(900)
def test_torchrun_passes_the_checks_of_launchers(tmp_path: Path, run_command) -> None:
    accel = str(Path(sys.executable).parent / "accel")
    words = ("plugins", "check", "torchrun", "--accel-level", "3", "-k", "launchers", "-q")
    ended = run(run_command, accel, *words, "--accel-report", "report.json", cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    checks = json.loads((tmp_path / "report.json").read_text())["checks"]
    assert len(checks) == 10, checks
    assert {check["outcome"] for check in checks} == {"passed"}


# -- what it costs others --------------------------------------------------------------------------


def test_other_peoples_pytest_loads_no_torch(tmp_path: Path, run_command) -> None:
    script = (
        "import sys, pytest; pytest.main(['-q', '--collect-only']); kit = 'accel_testing.';"
        " heavy = {'torch', kit + 'options', kit + 'kit', kit + 'processes'};"
        " print(sorted(heavy & {*sys.modules}))"
    )
    ended = run(run_command, sys.executable, "-c", script, cwd=tmp_path)
    assert ended.stdout.splitlines()[-1] == "['accel_testing.options']", ended.stdout + ended.stderr


# -- what to check ---------------------------------------------------------------------------------


def kit(run_command, cwd: Path, *options: str) -> str:
    ended = run(run_command, sys.executable, "-m", "pytest", "--pyargs", "accel_testing", *options, cwd=cwd)
    assert ended.returncode == pytest.ExitCode.USAGE_ERROR, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def test_without_a_stack_it_says_how_to_name_one(tmp_path: Path, run_command) -> None:
    assert "pytest --pyargs accel_testing --accel-stack native" in kit(run_command, tmp_path)


def test_an_unknown_plugin_is_named(tmp_path: Path, run_command) -> None:
    text = kit(run_command, tmp_path, "--accel-stack", "native+dpp")
    assert "--accel-stack native+dpp: no plugin 'dpp'" in text
    assert "installed: " in text


def test_two_plugins_of_a_slot_are_refused(tmp_path: Path, run_command) -> None:
    assert "fp16 and bf16 are both precisions" in kit(
        run_command, tmp_path, "--accel-stack", "native+fp16+bf16"
    )


def test_worlds_are_numbers(tmp_path: Path, run_command) -> None:
    text = kit(run_command, tmp_path, "--accel-stack", "native", "--accel-world", "two")
    assert "expected numbers joined by commas, such as 1,2; got 'two'" in text


def test_settings_reach_the_partners_of_checkpoints(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, site: Path
) -> None:
    partner = ("--accel-exchange-with", "asks-for-a-setting", "--accel-set", "data.use_seedable_sampler=true")
    level = ("--accel-level", "4", "--accel-world", "1", "-k", "test_cross_resume")
    found = run_kit(pytester, monkeypatch, site, "native", *level, *partner)
    assert found.report["resumes"]["asks-for-a-setting@1"] == {"native@1": "passed"}
    assert found.report["resumes"]["native@1"]["asks-for-a-setting@1"] == "passed"


# -- warnings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stack", "failed"), [("warns-itself", {"test_services_answer"}), ("its-vendor-warns", set[str]())]
)
def test_only_the_stacks_own_warnings_fail_a_check(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, site: Path, stack: str, failed: set[str]
) -> None:
    options = ("--accel-level", "1", "-k", "test_services_answer", "-W", "default")
    found = run_kit(pytester, monkeypatch, site, stack, *options)
    assert functions(found.failed) == failed, found.output
    assert functions(found.passed) == {"test_services_answer"} - failed


# -- known failures --------------------------------------------------------------------------------

BROKEN = "test_1_device.py::test_memory_is_reported_in_bytes"


def test_a_known_failure_is_expected(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, site: Path, tmp_path: Path
) -> None:
    xfails = tmp_path / "xfails.txt"
    xfails.write_text(f"# of this vendor\n{BROKEN}  # its library counts kilobytes, issue 12\n")
    found = run_kit(
        pytester,
        monkeypatch,
        site,
        *("counts-kilobytes", "--accel-level", "1", "-k", "memory", "--accel-xfails", str(xfails)),
    )
    assert functions(found.failed) == set()
    assert functions(found.xfailed) == {"test_memory_is_reported_in_bytes"}
    assert "its library counts kilobytes, issue 12" in found.output


def test_a_known_failure_that_passes_fails(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, site: Path, tmp_path: Path
) -> None:
    xfails = tmp_path / "xfails.txt"
    xfails.write_text(f"{BROKEN}  # mended long ago\n")
    options = ("--accel-level", "1", "-k", "memory", "--accel-xfails", str(xfails))
    found = run_kit(pytester, monkeypatch, site, "sound", *options)
    assert functions(found.failed) == {"test_memory_is_reported_in_bytes"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (BROKEN, "xfails.txt:1: no reason"),
        ("test_1_device.py::test_no_such_check  # gone", "not a check: test_1_device.py::test_no_such"),
    ],
)
def test_known_failures_need_a_reason_and_a_check(
    tmp_path: Path, line: str, message: str, run_command
) -> None:
    xfails = tmp_path / "xfails.txt"
    xfails.write_text(line)
    assert message in kit(run_command, tmp_path, "--accel-stack", "native", "--accel-xfails", str(xfails))


# -- versions --------------------------------------------------------------------------------------

NEWER = """
from accel_testing.kit.checks import since
def pytest_collection_modifyitems(items):
    for item in items:
        if "memory" in item.name:
            item.add_marker(since("9.9"))
"""


@pytest.mark.parametrize(
    ("stack", "ends"), [("counts-kilobytes", "would fail: AssertionError: "), ("sound", "would pass")]
)
def test_a_check_that_is_newer_than_a_card_does_not_fail(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, site: Path, stack: str, ends: str
) -> None:
    pytester.makepyfile(newer=NEWER)
    pytester.syspathinsert()
    found = run_kit(pytester, monkeypatch, site, stack, "--accel-level", "1", "-k", "memory", "-p", "newer")

    assert found.new == {BROKEN}
    assert not found.failed | found.skipped
    assert f"{BROKEN}: new since 9.9: {ends}" in found.output
    assert f"{stack}: 0 passed, 0 failed, 0 xfailed, 0 skipped, 1 new" in found.output


# -- capabilities ----------------------------------------------------------------------------------


def test_what_is_not_declared_is_left_out_and_said(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, site: Path
) -> None:
    options = ("--accel-level", "1", "-k", "random_streams or float8 or memory")
    found = run_kit(pytester, monkeypatch, site, "claims-too-little", *options)
    assert functions(found.failed) == set()
    assert found.skipped == {"rng", "fp8"}
    assert "not declared by the stack: rng (saves and restores its random generators)" in found.output
    assert "observed but not declared: " in found.output
    assert found.observed == {"rng", "fp8"}


# -- the report ------------------------------------------------------------------------------------


@pytest.mark.full
def test_the_report_can_be_published(tmp_path: Path, run_command) -> None:
    command = (sys.executable, "-m", "pytest", "--pyargs", "accel_testing", "--accel-stack", "sim")
    some = ("--accel-level", "1", "-k", "float8 or memory")
    ended = run(run_command, *command, *some, "--accel-report", "report.md", cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    text = (tmp_path / "report.md").read_text()
    assert "**Simulated**: obtained without the hardware" in text
    assert "* device: sim (accel-simulated 0.1)" in text
    assert re.search(r"\| 1 device \| [1-9]\d* \| 0 \| 0 \| 1 \|", text)  # float8

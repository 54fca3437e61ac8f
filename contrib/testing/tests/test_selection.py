"""The kit runs the checks that a slot of the stack can influence; a quick run has few of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from run_kit import functions

pytest_plugins = ["pytester"]

QUICK = {
    "test_2_training.py::test_losses_equal_the_plain_loop[2]",
    "test_2_training.py::test_clipping_by_norm[2]",
    "test_2_training.py::test_overflowing_steps_are_skipped[1]",
    "test_3_training.py::test_the_global_batch_decides_not_who_computes_it[world{world}-2]",
    "test_3_training.py::test_replicas_begin_and_stay_equal[world{world}]",
    "test_4_checkpoints.py::test_a_run_goes_on_as_if_nothing_had_happened[world{world}]",
}
NEEDS_DDP = pytest.mark.needs("accel-ddp")


def selected(pytester: pytest.Pytester, stack: str, *options: str) -> list[str]:
    """Names of the checks that the kit would run."""
    words = ("--pyargs", "accel_testing", "--accel-stack", stack, "--collect-only", "-q", *options)
    ended = pytester.runpytest_inprocess(*words, "-p", "no:cacheprovider")
    assert ended.ret in (0, pytest.ExitCode.NO_TESTS_COLLECTED), ended.stdout.str() + ended.stderr.str()
    return [line.rpartition("/")[2] for line in ended.outlines if "::" in line]


def files(checks: list[str]) -> set[str]:
    return {check.partition("::")[0].removeprefix("test_").removesuffix(".py") for check in checks}


@pytest.mark.parametrize(
    ("stack", "expected"),
    [
        ("jsonl", {"0_packaging", "1_trackers"}),
        ("torchrun", {"0_packaging", "3_launchers"}),
        ("plugins-check", {"0_packaging", "0_commands"}),
        (
            "bf16",
            {"0_packaging", "1_device", "2_training", "3_training", "3_parameters", "4_checkpoints"},
        ),
    ],
)
def test_only_what_a_slot_can_influence_runs(
    pytester: pytest.Pytester, stack: str, expected: set[str]
) -> None:
    assert files(selected(pytester, stack)) == expected


def test_a_tracker_needs_few_checks(pytester: pytest.Pytester) -> None:
    assert len(selected(pytester, "jsonl")) < 16


def test_a_stack_has_the_checks_of_all_its_slots(pytester: pytest.Pytester) -> None:
    both, one, other = (functions(selected(pytester, stack)) for stack in ("bf16+jsonl", "bf16", "jsonl"))

    assert both == one | other
    assert one - other
    assert other - one


def test_a_precision_is_checked_where_it_computes(pytester: pytest.Pytester) -> None:
    of_level_1 = selected(pytester, "bf16", "--accel-level", "1")

    assert of_level_1 == ["test_1_device.py::test_models_are_placed_whole"]


def test_the_packaging_of_cores_own_plugins_is_not_checked_with_others(pytester: pytest.Pytester) -> None:
    checks = selected(pytester, "sim+bf16+jsonl", "--accel-level", "0")

    assert {
        found[1].partition("-")[0] for found in map(re.compile(r"\[(.+)\]$").search, checks) if found
    } == {"sim"}


@pytest.mark.parametrize(("stack", "world"), [("native", 1), pytest.param("ddp", 2, marks=NEEDS_DDP)])
def test_a_quick_run_has_levels_0_and_1_and_six_checks(
    pytester: pytest.Pytester, stack: str, world: int
) -> None:
    checks, low = selected(pytester, stack, "--accel-quick"), ("test_0", "test_1")

    assert {check for check in checks if not check.startswith(low)} == {
        check.format(world=world) for check in QUICK
    }
    assert [check for check in checks if check.startswith(low)] == selected(
        pytester, stack, "--accel-level", "0,1"
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize("stack", ["native", pytest.param("ddp", marks=NEEDS_DDP)])
def test_a_quick_run_passes(tmp_path: Path, stack: str, conform) -> None:
    found = conform(tmp_path, stack, "--accel-quick")

    assert found.levels == {0, 1, 2, 3, 4}
    assert found.skipped == set()
    assert not found.report["complete"]


def test_the_command_has_a_flag_for_a_quick_run(tmp_path: Path, accel) -> None:
    ended = accel("plugins", "check", "torchrun", "--quick", "--collect-only", "-q", cwd=tmp_path)

    assert "test_workers_meet" in ended.stdout, ended.stderr
    assert "test_a_traceback_is_shown_once" not in ended.stdout


def test_single_checks_can_be_named(pytester: pytest.Pytester) -> None:
    named = ["test_1_device.py::test_services_answer", "test_2_training.py::test_clipping_by_value"]
    words = [word for name in named for word in ("--accel-only", name)]

    assert selected(pytester, "native", *words) == named


def test_a_name_that_is_no_checks_is_refused(pytester: pytest.Pytester) -> None:
    words = (
        "--pyargs",
        "accel_testing",
        "--accel-stack",
        "native",
        "--accel-only",
        "test_1_device.py::test_it",
    )
    ended = pytester.runpytest_inprocess(*words)

    assert "--accel-only names what is not a check: test_1_device.py::test_it" in ended.stderr.str()

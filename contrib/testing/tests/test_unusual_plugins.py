"""Odd but right plugins pass; were core's order broken, they would notice."""

from __future__ import annotations

from pathlib import Path

import pytest
import unusual_plugins
from run_kit import HERE, declare, describe, functions, run_kit

from accel_core import Card
from accel_testing.processes import PRELOAD_VARIABLE

pytest_plugins = ["pytester"]

CARDS = {name: card for name, card in vars(unusual_plugins).items() if isinstance(card, Card)}
LOOPS = {
    "test_a_student_learns_from_a_teacher",
    "test_a_window_communicates_once",
    "test_an_accumulated_step_is_left_alone_mid_window",
    "test_local_sgd_trains_apart_and_averages",
    "test_ranks_may_run_out_of_batches",
    "test_ranks_that_use_different_parameters_are_right_or_refused",
    "test_recomputed_activations_give_the_same_gradients",
    "test_sums_are_divided_by_the_items_of_the_window",
    "test_the_items_of_all_decide_not_who_has_them",
    "test_two_units_keep_windows_of_their_own",
}
"""Checks that call a model, or backward, themselves."""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    declare(tmp_path / "site", "unusual_plugins", CARDS)
    return tmp_path / "site"


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("stack", "levels", "worlds"),
    [
        ("late+replicas", "2", "2"),
        ("early", "0,1", "1"),
        pytest.param("late+replicas", "3", "2", marks=pytest.mark.full),
        pytest.param("lazy+replicas", "1,2", "1", marks=pytest.mark.full),
        pytest.param("native+grid", "3", "4", marks=pytest.mark.full),
        pytest.param("native+grid", "4", "4", marks=pytest.mark.full),
        pytest.param("native+scheduled", "2,4", "2", marks=pytest.mark.full),
        pytest.param("lazy+replicas", "3", "1", marks=pytest.mark.full),
        pytest.param("sim+pair", "3", "2", marks=pytest.mark.full),
        pytest.param("native+grid", "4", "2,4", marks=pytest.mark.full),
    ],
)
@pytest.mark.by_default("early-0,1-1")
def test_unusual_plugins_pass(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    site: Path,
    stack: str,
    levels: str,
    worlds: str,
) -> None:
    found = run_kit(pytester, monkeypatch, site, stack, "--accel-level", levels, "--accel-world", worlds)
    assert functions(found.failed) == set(), describe(found)
    assert found.skipped <= {"join", "fp8"} | (LOOPS if "scheduled" in stack else set())


@pytest.mark.timeout(300)
def test_a_stack_may_have_several_extensions(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, site: Path
) -> None:
    checks = "test_the_stack_binds or test_clipping_by_norm or changes_nothing or test_cross_resume"
    options = ("--accel-world", "1", "--accel-set", "second.every=2", "-k", checks)
    found = run_kit(pytester, monkeypatch, site, "native+first+second", *options)
    assert found.stack == "native+first+second"
    assert functions(found.failed) == set(), describe(found)
    assert functions(found.passed) == {
        "test_the_stack_binds",
        "test_clipping_by_norm",
        "test_a_hook_that_only_calls_the_layer_below_changes_nothing",
        "test_cross_resume",
    }


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_strategy_that_serves_few_networks_brings_one(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, site: Path
) -> None:
    options = ("--accel-level", "2,3,4", "--accel-world", "2", "--accel-exchange-with", "narrow@1")
    found = run_kit(
        pytester, monkeypatch, site, "native+narrow", "--accel-network", "unusual_plugins.words", *options
    )
    assert functions(found.failed) == set(), describe(found)
    assert found.skipped <= LOOPS | {
        "test_a_checkpoint_holds_what_state_dict_names",
        "test_a_checkpoint_is_the_same_bit_for_bit_elsewhere",
        "test_a_loop_of_ones_own_is_right_or_refused",
        "test_awkward_parameters_train_as_in_the_plain_loop",
        "test_awkward_parameters_train_as_over_global_batches",
        "test_buffers_that_differ_by_rank_are_exported_as_the_first_ranks",
        "test_forward_runs_in_the_precision",
        "test_layers_draw_alike_where_activations_are_alike",
    }
    assert found.report["resumes"]["narrow@1"] == {"native+narrow@2": "passed"}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("told", "some"),
    [
        pytest.param(True, "losses_equal or clipping_by_norm", marks=pytest.mark.full),
        (False, "losses_equal or clipping_by_norm"),
        pytest.param(True, "", marks=pytest.mark.full),
    ],
)
def test_a_precision_is_held_to_a_reference_of_its_own(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, site: Path, told: bool, some: str
) -> None:
    options = ("-k", some)
    options += ("--accel-reference", "unusual_plugins.coarse") if told else ()
    on = ("--accel-set", "coarse.rounded=true")
    found = run_kit(pytester, monkeypatch, site, "native+coarse", "--accel-level", "2", *on, *options)
    red = set() if told else {"test_losses_equal_the_plain_loop", "test_clipping_by_norm"}
    assert functions(found.failed) == red, describe(found)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_plugin_for_absent_hardware_is_checked_on_the_simulated_device(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, site: Path
) -> None:
    options = ("--accel-simulate", "absentccl", "--accel-level", "1,3", "--accel-world", "2")
    found = run_kit(pytester, monkeypatch, site, "absent+pair", *options)
    assert functions(found.failed) == set(), describe(found)
    assert found.report["simulated"]
    assert "absent + pair (simulated)" in found.output


def test_a_simulated_device_is_not_made_by_a_library_that_the_session_imports_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, site: Path, conform
) -> None:
    source = "from accel_testing.simulated.device import simulate\nsimulate('absent', 'absentccl')\n"
    (site / "looks_for_devices.py").write_text(source)
    monkeypatch.setenv(PRELOAD_VARIABLE, "looks_for_devices")
    options = ("--accel-simulate", "absentccl", "--accel-level", "1", "-k", "whole")

    found = conform(tmp_path, "absent", *options, path=[site, Path(HERE)])

    assert found.passed == {"test_1_device.py::test_models_are_placed_whole"}


BROKEN = [
    (
        "late+replicas",
        "clip_before_reducing",
        "3",
        {"test_clipping_sees_the_gradient_of_all", "test_the_items_of_all_decide_not_who_has_them"},
    ),
    (
        "sim+pair",
        "share_out_by_rank",
        "3",
        {
            "test_the_global_batch_decides_not_who_computes_it",
            "test_clipping_sees_the_gradient_of_all",
            "test_the_items_of_all_decide_not_who_has_them",
            "test_replicas_begin_and_stay_equal",
            "test_a_window_communicates_once",
            "test_awkward_parameters_train_as_over_global_batches",
            "test_ranks_that_use_different_parameters_are_right_or_refused",
        },
    ),
    (
        "lazy+replicas",
        "say_nothing",
        "2",
        {
            "test_mixed_precision",
            "test_overflowing_steps_are_skipped",
            "test_sums_are_divided_by_the_items_of_the_window",
        },
    ),
    ("early", "import_before_setting", "0", {"test_the_stack_binds"}),
]


@pytest.mark.parametrize("elsewhere", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("stack", "broken", "levels", "red"),
    [*(pytest.param(*each, marks=pytest.mark.full) for each in BROKEN[:-1]), BROKEN[-1]],
)
def test_unusual_plugins_notice_a_broken_core(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    site: Path,
    stack: str,
    broken: str,
    levels: str,
    red: set[str],
    elsewhere: bool,
) -> None:
    monkeypatch.setenv("BREAK_CORE", broken)
    worlds = "1" if stack == "lazy+replicas" else "2"
    options = () if elsewhere else ("-k", " or ".join(sorted(red)))
    given = ("--accel-level", levels, "--accel-world", worlds, *options)
    found = run_kit(pytester, monkeypatch, site, stack, *given)
    assert functions(found.failed) == red, describe(found)

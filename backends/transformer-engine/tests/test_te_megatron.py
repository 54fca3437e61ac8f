"""With strategy megatron, megatron-core's own layers of Transformer Engine compute in float8."""

from __future__ import annotations

import ast
import inspect
import os
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accel_megatron")
from te_megatron_jobs import (
    after_an_evaluation,
    delayed,
    forward,
    left_behind,
    refusals,
    resumed,
    trained,
    unbroken,
)

pytestmark = [pytest.mark.timeout(300), pytest.mark.needs("accel-megatron")]


def test_the_forward_is_that_of_megatrons_own_config_and_spec(run_processes) -> None:
    ((found, hand, told),) = run_processes(forward, "fp8-te", world=1, timeout=200)
    ((wide, _, _),) = run_processes(forward, "bf16", world=1, timeout=200)
    assert torch.equal(found, hand)
    assert (found - wide).abs().max() > 1e-3
    assert "float8 (Float8CurrentScaling): the layers of strategy megatron" in told


def test_every_weight_trains(run_processes) -> None:
    ((losses, untouched),) = run_processes(trained, world=1, timeout=200)
    assert untouched == []
    assert len(set(losses)) == 4


def test_a_checkpoint_goes_on_bit_for_bit(tmp_path: Path, run_processes) -> None:
    ((expected, found),) = run_processes(resumed, str(tmp_path / "state"), world=1, timeout=200)
    assert found == expected


ONE: dict[str, int] = {}
STAGES = {"pp_degree": 2}
TENSORS = {"tp_degree": 2}


@pytest.fixture(scope="module")
def delayed_run(tmp_path_factory: pytest.TempPathFactory, run_processes) -> tuple[Path, list[Any]]:
    """A checkpoint after two steps of delayed scaling in one process, and what it does."""
    folder = tmp_path_factory.mktemp("delayed") / "state"
    (found,) = run_processes(delayed, None, str(folder), 0, 3, ONE, world=1, timeout=200)
    return folder, found


@pytest.fixture(scope="module")
def without_a_break(run_processes) -> tuple[list[float], list[float]]:
    return run_processes(unbroken, world=1, timeout=200)[0]


def test_delayed_scaling_goes_on_bit_for_bit(
    delayed_run: tuple[Path, Any], without_a_break: tuple[list[float], list[float]], run_processes
) -> None:
    folder, (_, _, none, after) = delayed_run
    assert none == {}
    assert len(after) == 8  # two layers' four products
    assert all(bool((each[0] != 1).any()) for each in after.values())

    ((losses, checked, before, _),) = run_processes(
        delayed, str(folder), None, 2, 4, ONE, world=1, timeout=200
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in after)
    assert (losses, checked) == without_a_break


@pytest.mark.parametrize("layout", [STAGES, pytest.param(TENSORS, marks=pytest.mark.full)])
def test_delayed_scaling_resumes_where_ranks_share_the_model(
    delayed_run: tuple[Path, Any],
    without_a_break: tuple[list[float], list[float]],
    tmp_path: Path,
    layout: dict[str, int],
    run_processes,
) -> None:
    folder, (_, _, _, after) = delayed_run
    found = run_processes(delayed, str(folder), str(tmp_path / "two"), 2, 4, layout, world=2, timeout=200)
    begun = {name: each for rank in found for name, each in rank[2].items()}
    ended = {name: each for rank in found for name, each in rank[3].items()}
    assert found[0][0] == pytest.approx(without_a_break[0], abs=1e-2)
    assert begun.keys() == ended.keys() == after.keys()
    assert all(torch.equal(begun[name], after[name]) for name in after)
    assert len(found[0][2]) == (4 if layout is STAGES else 8)

    ((_, _, back, _),) = run_processes(delayed, str(tmp_path / "two"), None, 4, 5, ONE, world=1, timeout=200)
    assert all(torch.equal(back[name], ended[name]) for name in ended)


@pytest.mark.full
def test_maxima_of_an_evaluation_are_reduced_by_the_run_that_resumes(tmp_path: Path, run_processes) -> None:
    first, second = run_processes(after_an_evaluation, str(tmp_path / "state"), world=2, timeout=200)
    for _, expected, found in (first, second):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    # The second row of a tensor of `collect` is what is not reduced yet.
    larger = {name: (second[0][name][1] > first[0][name][1]).any() for name in first[0]}
    assert any(larger.values())


def test_a_run_with_delayed_scaling_leaves_no_buffers_to_reduce(run_processes) -> None:
    ((buffers, layers, right, told),) = run_processes(left_behind, world=1, timeout=200)
    assert (layers, right) == (8, 8)
    assert buffers == []
    assert "float8 (DelayedScaling): the layers of strategy megatron" in told


REFUSED = {
    "history": ("this is said by section fp8_te", "leave it out"),
    "reduction": ("layers have no fp8_te.reduce_amax", "leave it out, or use strategy fsdp or ddp"),
    "tp_only_amax_red": ("do not hold all scales", "or set fp8_te.recipe: current (block, mxfp8)"),
    "fp8_dot_product_attention": ("do not hold all scales", "or set fp8_te.recipe: current (block, mxfp8)"),
    "nvfp4": (
        "recipe nvfp4 of section fp8_te is not served",
        "set fp8_te.recipe: delayed, current, block or mxfp8",
    ),
    "padding": (
        "megatron-core's layers have no fp8_te.pad_tokens",
        "leave it out, or use strategy fsdp or ddp",
    ),
    "twice": ("other_megatron_args.fp8: this is said by mixed_precision: fp8-te", "leave it out"),
    "own": ("Own runs its own forward", "or a model of accel_megatron.build_model"),
    "bert": ("no layer of this model is transformer-engine's", "of its spec: accel_megatron.build_model"),
    "of megatron": (
        "with mixed_precision: fp8-te alone",
        "set that, or fp8_recipe: tensorwise (blockwise, mxfp8)",
    ),
    "weights": ("fp8_param keeps weights in float8", "leave it out"),
}


def test_what_would_not_compute_or_resume_in_float8_is_refused(run_processes) -> None:
    (said,) = run_processes(refusals, world=1, timeout=200)
    assert said.keys() == REFUSED.keys()
    for name, (reason, remedy) in REFUSED.items():
        assert reason in said[name]
        assert said[name].endswith(remedy)


def test_the_stand_ins_attention_takes_arguments_by_the_wheels_names() -> None:
    from transformer_engine.pytorch import DotProductAttention

    folder = Path(
        os.environ["ACCEL_TEST_VENDOR"], "transformer_engine/pytorch/attention/dot_product_attention"
    )
    tree = ast.parse((folder / "dot_product_attention.py").read_text())
    (theirs,) = [it for it in tree.body if isinstance(it, ast.ClassDef) and it.name == "DotProductAttention"]
    for function in theirs.body:
        if isinstance(function, ast.FunctionDef) and function.name in ("__init__", "forward"):
            names = {each.arg for each in function.args.args}
            mine = set(inspect.signature(getattr(DotProductAttention, function.name)).parameters)
            assert mine - {"others"} <= names

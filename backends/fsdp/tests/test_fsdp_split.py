"""Layers split over ranks that share nothing else train as in one process, without `fully_shard`."""

from __future__ import annotations

import grid_job
import pytest
import split_job
import torch
from test_fsdp_grids import PLAN, SEQUENCE, TIED

LOSS = {"ACCEL__TENSOR_PARALLEL__LOSS_PARALLEL": "true"}
RECOMPUTED = {
    "ACCEL__FSDP__ACTIVATION_CHECKPOINTING": "true",
    "ACCEL__FSDP__TRANSFORMER_CLS_NAMES_TO_WRAP": "Block",
}
CASES = {
    "plan": {"plan": PLAN, "clip": 0.1},
    "sequence": {"plan": SEQUENCE, "clip": 0.1},
    "tied": {"plan": TIED, "clip": 0.1},
    "adamw": {"plan": PLAN, "optimizer": "adamw", "clip": 0.1},
    "adamw, sequence": {"plan": SEQUENCE, "optimizer": "adamw"},
    "foreach": {"plan": PLAN, "options": {"foreach": True}},
    "fused": {"plan": PLAN, "optimizer": "adamw", "options": {"fused": True}},
    "window": {"plan": SEQUENCE, "window": 3, "clip": 0.1},
    "clamped": {"plan": SEQUENCE, "clamp": 0.001},
    "backward by hand": {"plan": SEQUENCE, "by_hand": True},
    "closure": {"plan": SEQUENCE, "closure": True},
    "frozen": {"plan": SEQUENCE, "frozen": True},
    "loss": {
        "plan": {**PLAN, "output": "colwise_rep"},
        "model": "untied",
        "clip": 0.1,
        "environment": LOSS,
    },
    "recomputed": {"plan": SEQUENCE, "clip": 0.1, "environment": RECOMPUTED},
}


@pytest.fixture(scope="module")
def found(run_processes):
    return run_processes(split_job.all_trained, CASES, world=2, timeout=200)


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_split_layers_train_to_the_weights_of_one_process(found, name):
    losses, norms, weights = split_job.plain(CASES[name])
    for mine in found:
        assert mine[name][0] == pytest.approx(losses, abs=1e-5)
        assert mine[name][1] == pytest.approx(norms, rel=1e-5)
        for key, value in weights.items():
            torch.testing.assert_close(mine[name][2][key], value, rtol=0, atol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_an_optimizer_has_its_groups_again_after_a_step(found, name):
    (count,) = [len(group["params"]) for group in split_job.made(CASES[name])[1].param_groups]
    assert all(mine[name][3] == [count] for mine in found)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["plain", "closure"])
def test_hooks_and_closures_of_a_step_see_the_groups_whole(kind, run_processes):
    seen, weights = split_job.grouped(None, kind)
    for mine, found in run_processes(split_job.grouped, PLAN, kind, world=2):
        assert mine == seen
        for key, value in weights.items():
            torch.testing.assert_close(found[key], value, rtol=0, atol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_layers_that_only_tensor_parallelism_splits_are_not_sharded(found, name):
    assert [mine[name][4] for mine in found] == [0, 0]


@pytest.mark.full
@pytest.mark.parametrize(
    ("environment", "hooked"),
    [
        ({"ACCEL__MIXED_PRECISION": "bf16"}, False),
        ({"ACCEL__FSDP__MIXED_PRECISION_POLICY": "bf16"}, False),
        ({"ACCEL__FSDP__CPU_OFFLOAD": "true"}, False),
        ({}, True),
    ],
    ids=["bf16", "policy", "offloaded", "hook of a parameter"],
)
def test_what_needs_hooks_of_torch_is_sharded_over_one_rank(environment, hooked, run_processes):
    found = run_processes(split_job.sharded, PLAN, environment, hooked, world=2)
    assert [(modules > 0, plain) for modules, plain in found] == [(True, 0)] * 2


@pytest.mark.full
def test_a_sequences_gradients_are_summed_once_per_window(run_processes):
    for of_one, of_three in run_processes(split_job.sent, SEQUENCE, world=2):
        assert of_one == of_three
        norms = 2 * 2 * 2 + 2  # weights and biases
        assert of_one[0] == norms


@pytest.mark.full
def test_gradients_are_laid_out_as_their_parameters_once_they_are_unscaled(run_processes):
    for before, after in run_processes(split_job.complete, SEQUENCE, world=2):
        assert before > 0
        assert after == 0


@pytest.mark.full
def test_a_write_to_whole_weights_counts_if_it_is_written_back(run_processes):
    for found in run_processes(split_job.whole_weights, SEQUENCE | {"norm": None}, world=2):
        assert found["state dict"] == {1.0}
        assert found["writeback False"] == {False}
        assert found["writeback True"] == {True}


@pytest.mark.full
def test_a_second_prepare_is_refused(run_processes):
    for prepared in run_processes(split_job.refused, PLAN, world=2):
        assert "is split already" in prepared


@pytest.mark.full
@pytest.mark.parametrize("kind", ["whole", "part", "object"])
def test_gradients_of_gradients_are_refused(kind, run_processes):
    for said in run_processes(split_job.second_order, PLAN, kind, world=2):
        assert "backward with create_graph=True" in said


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        (split_job.SPLIT, {"dp_shard": 2}),
        ({"dp_shard": 2}, split_job.SPLIT),
        (split_job.SPLIT, split_job.SPLIT),
    ],
    ids=["split-sharded", "sharded-split", "split-split"],
)
@pytest.mark.by_default("split-sharded-sgd")
def test_a_checkpoint_goes_on_with_other_parts(saved, resumed, optimizer, tmp_path, run_processes):
    def run(sizes, *, saves):
        case = {"sizes": sizes, "plan": SEQUENCE if "tp" in sizes else None, "optimizer": optimizer}
        return run_processes(split_job.continued, case, str(tmp_path / "state"), saves, world=2)

    _, _, weights = split_job.plain({"plan": None, "optimizer": optimizer})
    before = run(saved, saves=True)
    after = run(resumed, saves=False)
    assert len(before[0][0]) == grid_job.STEPS - 3
    for losses, found in (*before, *after):
        assert losses == pytest.approx(before[0][0], abs=1e-5)
        for key, value in weights.items():
            torch.testing.assert_close(found[key], value, rtol=0, atol=2e-6)

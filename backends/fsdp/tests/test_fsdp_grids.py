"""Sharded, replicated, split by layers, and all at once: a model trains as it does in one process."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import grid_job
import pytest
import torch

from accel_fsdp.tensor import extension as tensor_parallel

PLAN = grid_job.GPT_PLAN
TIED = {**PLAN, "embedding": "rowwise", "output": "colwise_rep"}
SEQUENCE = {
    **PLAN,
    "embedding": {"style": "rowwise", "output": "sequence"},
    "blocks.*.before": "sequence",
    "blocks.*.between": "sequence",
    "blocks.*.attention.[qkv]": {"style": "colwise", "input": "sequence"},
    "blocks.*.attention.o": {"style": "rowwise", "output": "sequence"},
    "blocks.*.up": {"style": "colwise", "input": "sequence"},
    "blocks.*.down": {"style": "rowwise", "output": "sequence"},
    "norm": "sequence",
    "output": {"style": "colwise", "input": "sequence", "output": "whole"},
}

HALF = {"ACCEL__MIXED_PRECISION": "fp16", "ACCEL__GRAD_SCALER__INIT_SCALE": "128"}

plain = cache(grid_job.plain)


def train(run_processes, name, sizes, plan=None, clip=0.1, norm_type=2.0, world=4, environment=(), **options):
    variables = grid_job.environment(sizes, plan, **dict(environment))
    return run_processes(_train, name, clip, norm_type, options, world=world, environment=variables)


def _train(name, clip, norm_type, options):
    return grid_job.trained(name, clip, norm_type, **options)


def assert_as_plain(found, name, clip=0.1, norm_type=2.0):
    losses, norms, weights = plain(name, clip, norm_type)
    for mine in found:
        assert mine[0] == pytest.approx(losses, abs=1e-5)
        assert mine[1] == pytest.approx(norms, rel=1e-4)
    assert found[0][2].keys() == weights.keys()
    for key, value in weights.items():
        torch.testing.assert_close(torch.tensor(found[0][2][key]), torch.tensor(value), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "plan", "world"),
    [
        ({"dp_replicate": 2}, None, 4),
        ({"tp": 2}, PLAN, 2),
        ({"tp": 2}, SEQUENCE, 2),
        ({"tp": 2}, TIED, 4),
        ({"dp_replicate": 2, "tp": 2}, PLAN, 4),
        ({"tp": 2}, SEQUENCE, 4),
    ],
    ids=["hsdp", "tp", "tp, sequence", "fsdp x tp, tied", "replicas x tp", "fsdp x tp, sequence"],
)
@pytest.mark.by_default("hsdp", "tp")
def test_a_grid_trains_as_one_process_does(sizes, plan, world, run_processes):
    assert_as_plain(train(run_processes, "gpt", sizes, plan, world=world), "gpt")


@pytest.mark.needs("transformers")
def test_a_transformers_model_brings_its_own_plan(run_processes):
    found = train(run_processes, "llama", {"tp": 2})
    assert_as_plain(found, "llama")
    assert found[0][3]["model.layers.0.self_attn.q_proj.weight"] == (2, 8)


@pytest.mark.full
@pytest.mark.needs("transformers")
@pytest.mark.parametrize("world", [2, 4])
def test_norms_of_heads_get_the_gradients_of_all_heads(world, run_processes):
    assert_as_plain(train(run_processes, "qwen", {"tp": 2}, world=world), "qwen")


@pytest.mark.parametrize("norm_type", [1.0, float("inf")])
@pytest.mark.by_default
def test_any_norm_is_that_of_the_whole_model(norm_type, run_processes):
    assert_as_plain(
        train(run_processes, "gpt", {"tp": 2}, TIED, norm_type=norm_type), "gpt", norm_type=norm_type
    )


@pytest.mark.full
@pytest.mark.parametrize("norm_type", [1.0, float("inf")])
def test_so_it_is_of_flat_weights(norm_type, run_processes):
    flat = {"ACCEL__FSDP__FSDP_VERSION": "1"}
    assert_as_plain(
        train(run_processes, "gpt", {}, norm_type=norm_type, world=2, environment=flat),
        "gpt",
        norm_type=norm_type,
    )


def test_sums_are_divided_by_the_words_of_all_readers(run_processes):
    assert_as_plain(train(run_processes, "gpt", {"tp": 2}, PLAN, sums=True), "gpt")


@pytest.mark.full
def test_a_loss_scale_is_taken_off_on_every_mesh(run_processes):
    losses = plain("gpt", 0.1)[0]
    for mine in train(run_processes, "gpt", {"tp": 2}, PLAN, environment=HALF):
        assert mine[0] == pytest.approx(losses, rel=2e-2)


def test_an_overflow_in_one_ranks_part_of_a_layer_skips_the_step_on_all(run_processes):
    variables = grid_job.environment({"tp": 2}, PLAN, **HALF)
    assert run_processes(grid_job.overflowed, "gpt", world=4, environment=variables) == [[False, True]] * 4


@pytest.mark.full
@pytest.mark.parametrize("kernels", ["foreach", "fused"])
def test_optimizers_that_step_all_parameters_at_once(kernels, run_processes):
    assert_as_plain(train(run_processes, "gpt", {"tp": 2}, PLAN, **{kernels: True}), "gpt")


def test_losses_of_split_logits(run_processes):
    environment = {"ACCEL__TENSOR_PARALLEL__LOSS_PARALLEL": "true"}
    plan = {**PLAN, "output": "colwise_rep"}
    found = train(run_processes, "untied", {"tp": 2}, plan, environment=environment)
    assert_as_plain(found, "untied")


@pytest.mark.full
def test_a_loss_of_split_logits_outside_its_context_is_noticed(run_processes):
    variables = grid_job.environment(
        {"tp": 2}, {"output": "colwise_rep"}, ACCEL__TENSOR_PARALLEL__LOSS_PARALLEL="true"
    )
    with pytest.raises(AssertionError, match="outside the context in which losses of split logits"):
        run_processes(grid_job.saved, "untied", "nowhere", 9, environment=variables)


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        (({"tp": 2}, TIED, 4), ({"tp": 2}, PLAN, 2)),
        (({"dp_replicate": 2}, None, 4), ({"tp": 2}, TIED, 4)),
        (({"tp": 2}, PLAN, 2), ({"dp_replicate": 2}, None, 4)),
        (({"tp": 2}, TIED, 4), None),
        (None, ({"tp": 2}, TIED, 4)),
    ],
    ids=["2x2-tp", "hsdp-2x2", "tp-hsdp", "2x2-native", "native-2x2"],
)
@pytest.mark.by_default
def test_a_checkpoint_goes_on_on_any_grid(saved, resumed, tmp_path, run_processes):
    folder, steps = str(tmp_path / "state"), 3

    def run(function, grid):
        sizes, plan, world = grid or ({}, None, 1)
        variables = grid_job.environment(sizes, plan) if grid else {"ACCEL__STRATEGY": "single"}
        return run_processes(function, "gpt", folder, steps, world=world, environment=variables)[0]

    before = run(grid_job.saved, saved)
    assert run(grid_job.resumed, resumed) == pytest.approx(before[steps:], abs=1e-5)


@pytest.mark.full
def test_what_is_written_while_parameters_are_whole_is_kept(run_processes):
    environment = grid_job.environment({"tp": 2}, PLAN)
    assert run_processes(grid_job.written_while_whole, "gpt", world=4, environment=environment) == [[]] * 4


@pytest.mark.full
@pytest.mark.parametrize("world", [2, 4])
def test_what_was_frozen_is_frozen_in_any_style(world, run_processes):
    environment = grid_job.environment({"tp": 2}, SEQUENCE)
    assert run_processes(grid_job.frozen, "gpt", world=world, environment=environment) == [[]] * world


@pytest.mark.full
@pytest.mark.parametrize(
    ("world", "variables"),
    [(2, {"FSDP__SHARDING_STRATEGY": "HYBRID_SHARD"}), (4, {"PARALLELISM__DP_REPLICATE": "2"})],
    ids=["within a node", "two replicas"],
)
def test_version_1_replicates_too(world, variables, run_processes):
    environment = {f"ACCEL__{name}": value for name, value in variables.items()}
    found = train(
        run_processes, "gpt", {}, world=world, environment={"ACCEL__FSDP__FSDP_VERSION": "1", **environment}
    )
    for mine in found:
        assert mine[0] == pytest.approx(plain("gpt", 0.1)[0], abs=1e-5)
        assert mine[1] == pytest.approx(plain("gpt", 0.1)[1], rel=1e-4)


@pytest.mark.full
def test_what_no_layer_splits_begins_alike_when_built_on_meta(run_processes):
    environment = grid_job.environment({"dp_shard": 1, "tp": 2}, {"*": None})
    one, other = run_processes(grid_job.built_on_meta, "gpt", environment=environment)
    assert one == other


@pytest.mark.full
def test_first_weights_of_split_layers_are_not_drawn_blindly(run_processes):
    with pytest.raises(AssertionError, match="torch cannot draw first weights of split layers on cpu"):
        run_processes(grid_job.built_on_meta, "gpt", environment=grid_job.environment({"tp": 2}, PLAN))


# -- what cannot be --------------------------------------------------------------------------------


def refusal(run_processes, sizes, plan=None, world=4, name="gpt", **more):
    with pytest.raises(AssertionError) as caught:
        run_processes(
            grid_job.prepared, name, world=world, environment=grid_job.environment(sizes, plan, **more)
        )
    return str(caught.value)


def test_sizes_that_do_not_fill_the_world_spell_every_factor(run_processes):
    text = refusal(run_processes, {"dp_replicate": 2, "dp_shard": 3, "tp": 2}, PLAN)
    assert "the mesh dp_replicate 2 × dp_shard 3 × tp 2 = 12, world 4" in text


@pytest.mark.full
def test_a_weight_that_does_not_divide_is_named_with_its_shape(run_processes):
    text = refusal(run_processes, {"tp": 3}, {"blocks.*.up": "colwise"}, world=3)
    assert "blocks.0.up.weight of shape (16, 8) is split along dimension 0, and 16 is not a multiple" in text
    assert "parallelism.tp 3" in text


def test_a_pattern_that_matches_nothing_is_named_with_near_ones(run_processes):
    text = refusal(run_processes, {"tp": 2}, {"blocks.0.upp": "colwise"})
    assert "'blocks.0.upp' matches no module of this Gpt; did you mean blocks.0.up" in text


@pytest.mark.full
def test_a_model_without_a_plan_is_refused(run_processes):
    assert "Gpt has no tp_plan of its own, and no plan was given" in refusal(run_processes, {"tp": 2})


@pytest.mark.full
def test_an_unknown_style_names_those_there_are(run_processes):
    text = refusal(run_processes, {"tp": 2}, {"blocks.*.up": "colwide"})
    assert "'colwide' for blocks.0.up is not a known style" in text
    assert "colwise_rep" in text


@pytest.mark.full
def test_a_layer_that_cannot_be_split_is_named(run_processes):
    assert "blocks.0.before is a LayerNorm" in refusal(
        run_processes, {"tp": 2}, {"blocks.*.before": "colwise"}
    )


@pytest.mark.full
def test_tied_weights_are_split_alike_or_not_at_all(run_processes):
    text = refusal(run_processes, {"tp": 2}, {"output": "colwise_rep"})
    assert "embedding.weight and output.weight are one weight" in text


@pytest.mark.full
@pytest.mark.parametrize("world", [2, 4])
def test_whole_parameters_that_ranks_would_train_apart_are_named_in_the_first_step(world, run_processes):
    plan = {**SEQUENCE, "blocks.0.before": None}
    environment = grid_job.environment({"tp": 2}, plan)
    for text in run_processes(grid_job.stepped, "gpt", world=world, environment=environment):
        assert "blocks.0.before.weight, blocks.0.before.bias differ on the ranks of tp" in text


@pytest.mark.full
@pytest.mark.parametrize("kind", ["closure", "outshone"])
def test_they_are_named_in_a_closure_and_beside_larger_gradients(kind, run_processes):
    forgotten, whole = (
        grid_job.environment({"tp": 2}, {**SEQUENCE, "norm": norm}) for norm in (None, "sequence")
    )
    for text in run_processes(grid_job.stepped_until, kind, environment=forgotten):
        assert "norm.weight, norm.bias differ on the ranks of tp" in text
    assert run_processes(grid_job.stepped_until, kind, environment=whole) == [None, None]


@pytest.mark.full
@pytest.mark.parametrize("world", [2, 4])
def test_whole_parameters_that_ranks_train_alike_step(world, run_processes):
    environment = grid_job.environment({"tp": 2}, PLAN)
    assert run_processes(grid_job.stepped, "gpt", world=world, environment=environment) == [None] * world


@pytest.mark.full
def test_a_parallel_loss_needs_split_logits(run_processes):
    text = refusal(run_processes, {"tp": 2}, PLAN, ACCEL__TENSOR_PARALLEL__LOSS_PARALLEL="true")
    assert "give it the style colwise_rep" in text


@pytest.mark.full
def test_flat_weights_are_not_split_by_layers(run_processes):
    assert "set fsdp.fsdp_version: 2" in refusal(
        run_processes, {"tp": 2}, PLAN, ACCEL__FSDP__FSDP_VERSION="1"
    )


@pytest.mark.needs("accel-ddp")
def test_a_strategy_that_does_not_know_dtensors_is_refused(run_processes):
    text = refusal(run_processes, {"tp": 2}, PLAN, ACCEL__STRATEGY="ddp")
    assert "needs dtensors, which the stack" in text


@pytest.mark.full
def test_torchs_tracker_of_random_operators_is_made_without_its_broadcast(monkeypatch):
    made = []
    monkeypatch.setattr(tensor_parallel.tracking, "_rng_tracker", None)
    monkeypatch.setattr(tensor_parallel.tracking, "is_rng_supported_mesh", lambda mesh: True)
    monkeypatch.setattr(
        tensor_parallel.tracking,
        "OffsetBasedRNGTracker",
        lambda mesh, **options: made.append(options) or mesh,
    )
    for _ in range(2):
        tensor_parallel._draw_without_agreement(SimpleNamespace(device_type="cuda"))
    assert made == [{"run_state_sync": False}]

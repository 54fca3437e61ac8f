"""Experts spread over ranks: a mixture trains as it does in one process, and goes on anywhere."""

from __future__ import annotations

from functools import cache

import experts_problem
import grid_job
import pytest
import torch

from accel_core import ConfigError, World, arrange
from accel_fsdp import FullyShardedDataParallelPlugin
from accel_fsdp.sharding.dims import declared


@cache
def plain(*arguments):
    return experts_problem.job("plain", *arguments)


def train(run_processes, name, sizes, world, clip=0.1, norm_type=2.0, more=(), plan=None, **options):
    variables = grid_job.environment(sizes, plan, **dict(more))
    job = experts_problem.trained, name, clip, norm_type, options
    return run_processes(*job, world=world, environment=variables)


def assert_as_plain(found, name, norm_type=2.0):
    losses, norms, weights = plain(name, 0.1, norm_type)
    for mine in found:
        assert mine[0] == pytest.approx(losses, abs=1e-5)
        assert mine[1] == pytest.approx(norms, rel=1e-4)
    assert found[0][2].keys() == weights.keys()
    for key, value in weights.items():
        torch.testing.assert_close(torch.tensor(found[0][2][key]), torch.tensor(value), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["chosen", "grouped"])
def test_experts_on_two_ranks_train_as_on_one(name, run_processes):
    found = train(run_processes, name, {"ep": 2}, 2)
    assert_as_plain(found, name)
    assert [mine[3]["blocks.0.1.experts.up"] for mine in found] == [(2, 8, 16)] * 2
    assert [mine[3]["blocks.0.1.router.weight"] for mine in found] == [(2, 8)] * 2


@pytest.mark.parametrize(
    ("sizes", "world"),
    [
        ({"ep": 2}, 4),
        pytest.param({"dp_replicate": 2, "ep": 2}, 4, marks=pytest.mark.full),
        pytest.param({"dp_replicate": 2, "dp_shard": 4, "ep": 2}, 8, marks=pytest.mark.full),
        pytest.param({"ep": -1}, 4, marks=pytest.mark.full),
    ],
    ids=["in half of the shards", "in replicas", "in half of each replica", "one expert a rank"],
)
def test_a_grid_with_experts_trains_as_one_process_does(sizes, world, run_processes):
    assert_as_plain(train(run_processes, "chosen", sizes, world), "chosen")


@pytest.mark.full
def test_layers_are_split_beside_experts(run_processes):
    plan = {pattern.replace("blocks.*", "blocks.*.0"): style for pattern, style in grid_job.GPT_PLAN.items()}
    assert_as_plain(train(run_processes, "chosen", {"tp": 2, "ep": 2}, 4, plan=plan), "chosen")


@pytest.mark.full
def test_stages_have_experts_too(run_processes):
    found = run_processes(
        experts_problem.piped, world=4, environment=grid_job.environment({"pp": 2, "ep": 2})
    )
    losses, _, weights = plain("chosen", 0.1)
    for mine, names in found:
        assert mine == pytest.approx(losses, abs=1e-5)
        for key, value in names.items():
            torch.testing.assert_close(torch.tensor(value), torch.tensor(weights[key]), rtol=1e-4, atol=1e-5)


def test_a_rank_that_no_token_chooses_goes_along(run_processes):
    assert_as_plain(train(run_processes, "one-sided", {"ep": 2}, 2), "one-sided")


@pytest.mark.needs("transformers")
def test_a_transformers_mixture_needs_no_option_but_the_size(run_processes):
    found = train(run_processes, "mixtral", {"ep": 2}, 2)
    assert_as_plain(found, "mixtral")
    assert found[0][3]["model.layers.0.mlp.experts.down_proj"] == (2, 8, 16)


@pytest.mark.full
@pytest.mark.parametrize("norm_type", [1.0, float("inf")])
def test_any_norm_is_that_of_all_experts(norm_type, run_processes):
    found = train(run_processes, "chosen", {"ep": 2}, 4, norm_type=norm_type)
    assert_as_plain(found, "chosen", norm_type=norm_type)


def test_sums_are_divided_by_the_words_of_all_readers(run_processes):
    assert_as_plain(train(run_processes, "chosen", {"ep": 2}, 2, sums=True, fused=True), "chosen")


@pytest.mark.full
@pytest.mark.parametrize(
    "more",
    [
        {"ACCEL__MIXED_PRECISION": "bf16"},
        {"ACCEL__MIXED_PRECISION": "fp16", "ACCEL__GRAD_SCALER__INIT_SCALE": "128"},
    ],
    ids=["bf16", "fp16"],
)
@pytest.mark.parametrize("name", ["chosen", "grouped"])
def test_precision_is_lower_for_experts_too(name, more, run_processes):
    losses = plain(name, 0.1, 2.0)[0]
    for mine in train(run_processes, name, {"ep": 2}, 4, more=more):
        assert mine[0] == pytest.approx(losses, rel=3e-2)


@pytest.mark.full
@pytest.mark.parametrize(
    "more",
    [
        {
            "ACCEL__COMPILE__BACKEND": "aot_eager",
            "ACCEL__COMPILE__USE_REGIONAL_COMPILATION": "true",
        },
        {"ACCEL__FSDP__ACTIVATION_CHECKPOINTING": "true"},
        {"ACCEL__FSDP__CPU_OFFLOAD": "true"},
        {"ACCEL__FSDP__TRANSFORMER_CLS_NAMES_TO_WRAP": "Layer"},
    ],
    ids=["compiled", "computed again", "offloaded", "in blocks"],
)
def test_what_else_sharding_does_it_does_to_experts(more, run_processes):
    assert_as_plain(train(run_processes, "chosen", {"ep": 2}, 4, more=more), "chosen")


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        (({"ep": 2}, 4), ({"ep": 2}, 2)),
        (({"ep": 2}, 2), None),
        pytest.param(None, ({"ep": 2}, 4), marks=pytest.mark.full),
        pytest.param(({"ep": 4}, 4), ({"dp_shard": 2}, 2), marks=pytest.mark.full),
    ],
    ids=["2x2-2", "2-native", "native-2x2", "4-fsdp"],
)
@pytest.mark.by_default
def test_a_checkpoint_goes_on_with_experts_anywhere(saved, resumed, tmp_path, run_processes):
    folder, steps = str(tmp_path / "state"), 3

    def run(function, grid):
        sizes, world = grid or ({}, 1)
        variables = grid_job.environment(sizes) if grid else {"ACCEL__STRATEGY": "single"}
        job = experts_problem.job, function, "chosen", folder, steps
        return run_processes(*job, world=world, environment=variables)[0]

    before = run("saved", saved)
    assert run("resumed", resumed) == pytest.approx(before[steps:], abs=1e-5)


@pytest.mark.full
def test_what_is_written_while_experts_are_whole_is_kept(run_processes):
    environment = grid_job.environment({"ep": 2})
    job = experts_problem.job, "written_while_whole", "chosen"
    found = run_processes(*job, world=4, environment=environment)
    assert found == [[]] * 4


@pytest.mark.full
def test_experts_are_loaded_by_one_rank(run_processes):
    variables = grid_job.environment({"ep": 2}, ACCEL__FSDP__CPU_RAM_EFFICIENT_LOADING="true")
    found = run_processes(experts_problem.loaded_by_one, world=2, environment=variables)
    assert_as_plain(found, "chosen")


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_model_without_experts_conforms(tmp_path, conform):
    options = (
        "--accel-set",
        "parallelism.ep=-1",
        "--accel-set",
        "fsdp.ep_modules=[]",
        "--accel-world",
        "1,2",
    )
    assert not conform(tmp_path, "fsdp", "--accel-level", "0,1,2,3,4", *options).failed


# -- what cannot be --------------------------------------------------------------------------------


def refusal(run_processes, sizes, name="chosen", world=2, job=(experts_problem.job, "prepared"), **more):
    with pytest.raises(AssertionError) as caught:
        run_processes(*job, name, world=world, environment=grid_job.environment(sizes, **more))
    return str(caught.value)


@pytest.mark.parametrize(("sizes", "world"), [({"dp_shard": 2, "ep": 4}, 8), ({"dp_shard": 1, "ep": 2}, 2)])
def test_a_size_of_experts_that_was_meant_as_a_factor_is_refused_with_the_new_sizes(sizes, world):
    dims = declared(FullyShardedDataParallelPlugin(), sizes, World(rank=0, size=world, local_size=world))
    with pytest.raises(ConfigError) as caught:
        arrange(dims, world)
    said, remedy = str(caught.value).splitlines()
    assert f"world {world}: ep {sizes['ep']} is not a factor, it divides dp_shard" in said
    assert remedy == f"set dp_shard: {world}, ep: {sizes['ep']}"


def test_a_size_of_experts_that_does_not_divide_the_shards_is_refused(run_processes):
    text = refusal(run_processes, {"dp_shard": 2, "ep": 3})
    assert "ep 3 does not divide the 2 rank(s) of dp_shard" in text


def test_experts_that_do_not_divide_are_named_with_their_number(run_processes):
    assert "blocks.0.1.experts has 4 experts, which is not a multiple of it" in refusal(
        run_processes, {"ep": 3}, world=3
    )


@pytest.mark.full
def test_modules_that_do_not_exist_are_named_with_near_ones(run_processes):
    text = refusal(run_processes, {"ep": 2}, ACCEL__FSDP__EP_MODULES="blocks.0.1.expert")
    assert "blocks.0.1.expert match no module of this Moe; did you mean blocks.0.1.experts" in text


@pytest.mark.full
def test_a_list_of_experts_is_refused(run_processes):
    assert "experts is a list of experts, which are called one by one" in refusal(
        run_processes, {"ep": 2}, "listed"
    )


@pytest.mark.full
def test_what_is_no_stack_of_experts_is_refused(run_processes):
    assert "experts has bias of shape (8,), and is not a stack" in refusal(run_processes, {"ep": 2}, "dense")


@pytest.mark.full
def test_a_call_of_another_kind_is_refused_with_its_shapes(run_processes):
    text = refusal(run_processes, {"ep": 2}, "called", job=(experts_problem.called,))
    assert "experts was called with (2, 8), str" in text


@pytest.mark.full
def test_flat_weights_are_not_spread(run_processes):
    assert "parallelism.ep is for fsdp_version 2" in refusal(
        run_processes, {"ep": 2}, ACCEL__FSDP__FSDP_VERSION="1"
    )

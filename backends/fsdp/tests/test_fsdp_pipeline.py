"""A model in pipeline stages trains as in one process, and keeps its names in checkpoints."""

from __future__ import annotations

import pipeline_problem as problem
import pytest
import torch
from pipeline_problem import Bare, Gpt, Muddled, Named

from accel_core import ConfigError

SPLIT = {
    "parallelize_plan": {
        "blocks.*.mlp.0": "colwise",
        "blocks.*.mlp.2": "rowwise",
        "tokens": "rowwise",
        "head": "colwise_rep",
    },
    "loss_parallel": True,
}

PIPE = {"pp": 2}
WAYS = {
    "native": ({}, 1),
    "pipeline": (PIPE, 2),
    "interleaved": ({**PIPE, "pp_schedule": "Interleaved1F1B"}, 2),
    "split": ({**PIPE, "split": SPLIT}, 4),
}

WHOLE = sum(parameter.numel() for parameter in Gpt().parameters())


@pytest.fixture(scope="module")
def native(run_processes):
    (found,) = run_processes(problem.trained, Gpt, {}, world=1)
    return found


def assert_same(found, native):
    torch.testing.assert_close(found["losses"], native["losses"], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found["norms"], native["norms"], rtol=5e-3, atol=1e-3)
    assert found["weights"].keys() == native["weights"].keys()
    for name, weight in native["weights"].items():
        if "mix.bias" not in name:  # of keys: their gradients are noise around zero
            torch.testing.assert_close(found["weights"][name], weight, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS"])
@pytest.mark.by_default
def test_losses_norms_and_weights_equal_one_process(native, schedule, run_processes):
    options = {"pp": 2, "pp_schedule": schedule}
    first, last = run_processes(problem.trained, Gpt, options, world=2, timeout=100)
    for found in (first, last):
        assert_same(found, native)
        assert found["evaluated"] == pytest.approx(native["evaluated"], rel=1e-3)
    assert first["held"] + last["held"] == WHOLE
    assert (first["outputs"], last["outputs"]) == ([], native["outputs"])


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
def test_losses_that_are_sums_are_divided_by_the_tokens_of_the_window(world, run_processes):
    plainly = problem.counted_plainly()
    for found in run_processes(problem.counted, {"pp": 2}, world=world, timeout=100):
        torch.testing.assert_close(found, plainly, rtol=0, atol=1e-12)


# -- a weight of the first stage and of the last ---------------------------------------------------


@pytest.fixture(scope="module")
def native_tied(run_processes):
    (found,) = run_processes(problem.trained, problem.tied, {}, world=1)
    return found


def test_tied_weights_stay_one_weight(native_tied, run_processes):
    for found in run_processes(problem.trained, problem.tied, {"pp": 2}, world=2, timeout=100):
        assert_same(found, native_tied)


@pytest.mark.full
def test_what_stages_have_summed_is_counted_once_where_another_window_adds_to_it(run_processes):
    (expected,) = run_processes(problem.trained_by_two_windows, {}, world=1)
    for norms in run_processes(problem.trained_by_two_windows, {"pp": 2}, world=2, timeout=100):
        assert norms == pytest.approx(expected, rel=1e-3)


@pytest.mark.full
def test_they_begin_as_those_of_the_first_stage_and_are_saved_once(tmp_path, run_processes):
    ((loss, weights),) = run_processes(problem.begun_apart, {}, str(tmp_path / "one"), world=1)
    for found, theirs in run_processes(problem.begun_apart, {"pp": 2}, str(tmp_path / "two"), world=2):
        assert found == pytest.approx(loss, rel=1e-4)
        assert theirs.keys() == weights.keys()
        assert "head.weight" not in weights
        assert all(torch.equal(theirs[name], weight) for name, weight in weights.items())


@pytest.mark.parametrize(("saver", "loader"), [("pipeline", "native"), ("native", "pipeline")])
def test_they_are_saved_as_one_and_loaded_by_both(tmp_path, saver, loader, run_processes):
    folder = str(tmp_path / "checkpoint")
    (options, world), (others, size) = WAYS[saver], WAYS[loader]
    expected = run_processes(problem.saved, options, folder, 3, True, world=world)[0]
    for losses in run_processes(problem.resumed, others, folder, 3, True, world=size):
        assert losses == pytest.approx(expected, rel=1e-4)


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        {"pp_schedule": "Interleaved1F1B"},
        {"pp": 4},
        {"cpu_offload": True},
        {"pp": 2, "split": SPLIT},
        {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_cls_names_to_wrap": ["Block"]},
        {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_cls_names_to_wrap": ["Embedding"]},
    ],
    ids=["interleaved", "four ranks", "offloaded", "split", "sharded", "sharded apart"],
)
def test_so_they_do_however_stages_are_laid_out(native_tied, options, run_processes):
    for found in run_processes(problem.trained, problem.tied, options, world=4, timeout=100):
        assert_same(found, native_tied)


@pytest.mark.full
def test_activations_of_blocks_may_be_computed_again_in_whichever_stage_they_are(native, run_processes):
    options = {"activation_checkpointing": True, "transformer_cls_names_to_wrap": ["Block"]}
    first, last = run_processes(
        problem.trained, Gpt, {"pp": 2, "pp_split_points": ["norm"], **options}, 3, world=2
    )
    assert first["losses"] == last["losses"] == pytest.approx(native["losses"][:3], rel=1e-3)


def test_stages_of_two_ranks_are_sharded_over_two_more(native, run_processes):
    options = {"pp": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    options["transformer_cls_names_to_wrap"] = ["Block"]
    for found in run_processes(problem.trained, Gpt, options, world=4, timeout=100):
        assert_same(found, native)


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["1F1B", pytest.param("Interleaved1F1B", marks=pytest.mark.full)])
def test_layers_of_stages_are_split_over_two_ranks_each(native, schedule, run_processes):
    options = {"pp": 2, "pp_schedule": schedule, "split": SPLIT}
    found = run_processes(problem.trained, Gpt, options, world=4, timeout=100)
    for each in found:
        assert_same(each, native)
        assert each["evaluated"] == pytest.approx(native["evaluated"], rel=1e-3)
    assert found[0]["held"] + found[2]["held"] == WHOLE  # of DTensors the whole is counted


@pytest.mark.full
def test_a_model_may_be_built_on_the_meta_device(run_processes):
    (losses, one, weights), (others, other, same) = run_processes(problem.built_on_meta, PIPE, world=2)
    assert losses == others
    assert losses[1] < losses[0]
    assert one + other == WHOLE
    for name, weight in weights.items():
        assert torch.equal(weight, same[name])
        assert weight.isfinite().all(), name


@pytest.mark.full
def test_the_first_step_draws_and_counts_no_more_than_others(run_processes):
    ((counts, _),) = run_processes(problem.normed, {}, world=1)
    for mine, (first, second) in run_processes(problem.normed, {"pp": 2}, world=2):
        assert first == second
        assert mine == {name: pytest.approx(counts[name], abs=1e-4) for name in mine}
        assert mine, "the stage has no buffers"


@pytest.mark.full
def test_a_loss_in_16_bits_reaches_all_ranks(native, run_processes):
    first, last = run_processes(problem.halved, world=2)
    assert first == last == pytest.approx(native["losses"][0], rel=2e-2)


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_a_window_may_be_shorter_than_the_pipeline(schedule, run_processes):
    losses = run_processes(problem.short, schedule, 1, world=2)
    model, (batch,) = Gpt(), problem.window(0, 1)
    assert losses == [pytest.approx(problem.loss_of(model, batch)[0].item())] * 2


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["1F1B", "LoopedBFS"])
def test_a_window_of_one_micro_batch_may_follow_longer_ones_where_stages_are_sharded(schedule, run_processes):
    (native,) = run_processes(problem.shrunk, {}, world=1)
    options = {"pp": 2, "dp_shard": 2, "pp_schedule": schedule}
    for weights in run_processes(problem.shrunk, options, world=4):
        torch.testing.assert_close(weights, native)


@pytest.mark.full
def test_a_number_of_micro_batches_that_the_schedule_cannot_have_is_named(run_processes):
    for said in run_processes(problem.short, "Interleaved1F1B", 5, world=2):
        assert "ScheduleInterleaved1F1B cannot run 5 micro-batches" in said


def test_a_model_names_its_split_points_and_the_config_overrules_it(run_processes):
    named = run_processes(problem.trained, Named, {"pp": 2}, 1, world=2)
    other = run_processes(problem.trained, Named, {"pp_split_points": ["blocks.3"]}, 1, world=2)
    assert named[0]["held"] < other[0]["held"]
    assert named[0]["losses"] == pytest.approx(other[0]["losses"])


# -- checkpoints -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("saver", "loader"),
    [
        ("pipeline", "native"),
        ("native", "pipeline"),
        ("pipeline", "interleaved"),
        ("split", "native"),
        ("pipeline", "split"),
    ],
)
@pytest.mark.by_default
def test_what_one_saved_the_other_goes_on_with(tmp_path, saver, loader, run_processes):
    folder = str(tmp_path / "checkpoint")
    (options, world), (others, size) = WAYS[saver], WAYS[loader]
    expected = run_processes(problem.saved, options, folder, world=world)[0]
    for losses in run_processes(problem.resumed, others, folder, world=size):
        assert losses == pytest.approx(expected, rel=1e-4)


# -- mistakes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (Bare, {}, "has weights of its own: scale"),
        (problem.Counted, {}, "state_dict() has _extra_state, which are neither parameters nor buffers"),
        (problem.Repeated, {}, "blocks.0.norm is one module of stages 0 and 1"),
        (Gpt, {"activation_checkpointing": True}, "name its blocks"),
        (Gpt, {"pp_split_points": ["blocks.9"]}, "no module 'blocks.9'"),
        (Gpt, {"pp_split_points": ["blocks.1", "blocks.2"]}, "needs 2 stages"),
        (Gpt, {"pp_schedule": "Interleaved1F1B", "pp_split_points": ["blocks.1"]}, "several times 2 stages"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(kind, options, words, run_processes):
    for said in run_processes(problem.unprepared, kind, {"pp": 2, **options}, world=2):
        assert words in said


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (problem.Sequence, "scale.weight, []: a parameter without dimensions cannot be sharded"),
        (problem.LookedUp, "tokens.weight, [18, 16]: sparse gradients (sparse=True) cannot be sharded"),
    ],
)
def test_a_parameter_that_cannot_be_sharded_is_refused_by_the_ranks_of_all_stages(kind, words, run_processes):
    for said in run_processes(problem.unprepared, kind, {"pp": 2}, world=2):
        assert words in said


@pytest.mark.full
def test_a_module_that_is_registered_out_of_turn_is_named(run_processes):
    said = run_processes(problem.unprepared, Muddled, {"pp": 2}, world=2)
    assert "norm is of stage 0" in said[1]


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "schedule"),
    [
        (problem.Skipping, "1F1B"),
        (problem.Towers, "Interleaved1F1B"),
        (problem.Measured, "1F1B"),
        (problem.Copied, "1F1B"),
    ],
)
def test_what_skips_a_stage_is_refused(kind, schedule, run_processes):
    said = run_processes(problem.unprepared, kind, {"pp": 2, "pp_schedule": schedule}, world=2)
    assert any("beside the one tensor that stages send" in each for each in said)


@pytest.mark.full
def test_a_layer_that_gives_several_values_is_refused_by_the_stage_after_it(run_processes):
    _, said = run_processes(problem.unprepared, problem.Several, {"pp": 2}, world=2)
    assert said.startswith("pipeline: stage 1 cannot pass over the modules before it in Several")
    assert "ValueError: not enough values to unpack" in said
    assert "fsdp.pp_split_points" in said.splitlines()[-1]


@pytest.mark.full
def test_activations_that_go_by_keyword_are_refused_by_the_stage_before(run_processes):
    said, _ = run_processes(problem.unprepared, problem.ByKeyword, {"pp": 2}, world=2)
    assert said.startswith("pipeline: blocks.2, where stage 1 begins, is called without a positional")


@pytest.mark.full
def test_activations_that_are_pairs_are_refused_by_the_stage_before(run_processes):
    """The next stage got the first of them, and could take its rows for the pair."""
    said, _ = run_processes(problem.unprepared, problem.Paired, {"pp": 2}, world=2)
    assert said.startswith("pipeline: blocks.2, where stage 1 begins, is called with a tuple first")


@pytest.mark.full
def test_activations_of_any_memory_order_are_sent(run_processes):
    (plain,) = run_processes(problem.trained, problem.Transposed, {}, 3, world=1)
    found, _ = run_processes(problem.trained, problem.Transposed, {"pp": 2}, 3, world=2)
    assert found["losses"] == pytest.approx(plain["losses"], abs=1e-5)


@pytest.mark.full
def test_a_hook_of_the_model_is_given_outputs_and_not_what_stages_send(run_processes):
    (plain,) = run_processes(problem.trained, problem.Scaled, {}, 3, world=1)
    found, _ = run_processes(problem.trained, problem.Scaled, {"pp": 2}, 3, world=2)
    assert found["losses"] == pytest.approx(plain["losses"], abs=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_hooks_put_after_prepare_and_those_of_gradients_are_for_outputs_of_the_model_too(
    schedule, run_processes
):
    (plain,) = run_processes(problem.scaled_later, {}, world=1)
    for losses in run_processes(problem.scaled_later, {"pp_schedule": schedule}, world=2):
        assert losses == pytest.approx(plain, abs=1e-5)


@pytest.mark.full
def test_a_backward_hook_of_a_module_in_several_stages_is_refused(run_processes):
    options = {"pp": 2, "pp_split_points": ["1.2"]}
    for said in run_processes(problem.unprepared, problem.Listed, options, world=2):
        assert said.startswith("pipeline: a backward hook of 1 is never called, as no stage has its inputs")


@pytest.mark.full
def test_a_backward_hook_of_the_model_is_refused_where_its_input_requires_a_gradient(run_processes):
    said, _ = run_processes(problem.hooked_with_an_input_that_requires_a_gradient, {"pp": 2}, world=2)
    assert said.startswith("pipeline: a backward hook of Sequential, whose input requires a gradient, is")


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_all_stages_of_a_micro_batch_draw_the_same_numbers_before_the_model(schedule, run_processes):
    ((plain, _),) = run_processes(problem.noised, {}, world=1)
    first, last = run_processes(problem.noised, {"pp_schedule": schedule})

    assert last[0] == pytest.approx(plain)
    assert first[1] == last[1]


@pytest.mark.full
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_draws_after_the_model_leave_those_before_it_alike(schedule, every, run_processes):
    first, last = run_processes(problem.noised, {"pp_schedule": schedule}, True, every)

    assert first[1] == last[1]


@pytest.mark.full
@pytest.mark.parametrize("kind", [problem.InPlace, problem.Recomputed])
def test_what_is_computed_before_a_stage_begins_changes_nothing_in_it(kind, run_processes):
    (plain,) = run_processes(problem.trained, kind, {}, 3, world=1)
    for found in run_processes(problem.trained, kind, {"pp": 2}, 3, world=2):
        assert_same(found, plain)
        assert found["evaluated"] == pytest.approx(plain["evaluated"], rel=1e-3)


def test_what_a_pipeline_cannot_do_says_what_to_do_instead(run_processes):
    for said in run_processes(problem.misused, world=2):
        assert "forward_backward" in said["call"].splitlines()[-1]
        assert "forward_backward" in said["backward"].splitlines()[-1]
        assert "pad them to one shape" in said["shapes"]
        assert "iter_weights" in said["whole"]
        assert "give each model an optimizer of its own" in said["two"]


@pytest.mark.full
def test_after_an_exception_in_a_window_the_next_is_refused(run_processes):
    for said in run_processes(problem.interrupted, world=2):
        assert said.startswith("pipeline: an exception has left a window in its midst")


@pytest.mark.full
def test_version_1_has_no_stages():
    with pytest.raises(ConfigError, match="parallelism.pp is for fsdp_version 2"):
        problem.accelerator_of(fsdp_version=1, pp=2)


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "whole"),
    [
        ({}, True),
        ({"mixed_precision": "bf16"}, True),
        ({"mixed_precision_policy": "bf16"}, False),
        ({"cpu_offload": True}, False),
        ({"cpu_offload": True, "mixed_precision": "bf16"}, False),
    ],
    ids=["alone", "bf16", "policy", "offloaded", "offloaded in bf16"],
)
def test_a_stage_that_no_rank_shares_stays_whole(options, whole, run_processes):
    precision = {"mixed_precision": "bf16"} if "bf16" in options.values() else {}
    losses, norms, *_ = problem.staged(precision)
    for found in run_processes(problem.staged, {"pp": 2, **options}, world=2, timeout=100):
        near = 1e-5 if not precision else 1e-4 if whole else 1e-2
        assert found[0] == pytest.approx(losses, rel=near)
        assert found[1] == pytest.approx(norms, rel=100 * near)
        assert (found[2] == 0) is whole
        said = "cut into stages" if whole else "sharded"
        assert f"Gpt was {said} by an earlier prepare" in found[3]


@pytest.mark.full
def test_sharded_stages_send_activations_in_the_dtype_that_they_compute_in(run_processes):
    found = run_processes(problem.sent, world=4, timeout=100)
    assert found == ["None", "None", "torch.bfloat16", "torch.bfloat16"]


# -- traffic ---------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS"])
def test_a_window_reduces_once_whatever_its_number_of_micro_batches(schedule, run_processes):
    options = {"pp": 2, "pp_schedule": schedule, "transformer_cls_names_to_wrap": ["Block"]}
    for few, many in run_processes(problem.reductions, options, [2, 8], world=4, timeout=100):
        assert few == many == 3  # two blocks, and the model around them


BLOCK = sum(p.numel() for p in problem.Block().parameters()) * 4


def test_a_stage_gathers_each_of_its_blocks_once_per_window(run_processes):
    found = run_processes(problem.gathers, {"pp": 2}, 8, world=4, timeout=100)
    for number, _, lines in found:
        assert number == 4 + 1  # four blocks, and the model around them
        assert any(line.endswith(f"4 groups: {BLOCK:,} bytes each") for line in lines)


@pytest.mark.full
def test_gathering_blocks_for_each_micro_batch_has_to_be_asked_for_and_computes_the_same(run_processes):
    options = {"pp": 2, "reshard_after_forward": True}
    kept = run_processes(problem.gathers, {"pp": 2}, 8, world=4, timeout=100)
    again = run_processes(problem.gathers, options, 8, world=4, timeout=100)
    for (few, loss, _), (many, same, _) in zip(kept, again, strict=True):
        assert many > 8 * (few - 1)
        assert same == pytest.approx(loss, rel=1e-6)


def test_what_a_stage_holds_is_explained(run_processes):
    model = problem.Gpt(8)
    ends = [(model.tokens, model.where, *model.blocks[:4]), (*model.blocks[4:], model.norm, model.head)]
    held = [sum(p.numel() for part in parts for p in part.parameters()) * 4 for parts in ends]
    first, last = (lines for _, _, lines in run_processes(problem.gathers, {"pp": 2}, 2, world=2))
    assert f"pipeline stage 0 of 0 to 1: tokens to blocks.3, 6 modules, {held[0]:,} bytes" in first
    assert f"pipeline stage 1 of 0 to 1: blocks.4 to head, 6 modules, {held[1]:,} bytes" in last


@pytest.mark.full
def test_blocks_of_stages_are_compiled_alone_and_share_their_code(run_processes):
    few = run_processes(problem.compiled, 4, world=2, timeout=110)
    many = run_processes(problem.compiled, 8, world=2, timeout=110)
    assert few == many
    for kinds, _ in many:
        assert kinds == {"Block"}

"""Ranks that share sequences train as one process that has them whole."""

from __future__ import annotations

from typing import NamedTuple

import cp_problem
import pytest
import torch
from cp_problem import LENGTH, SPLIT, Gpt, samples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils.data import default_collate

from accel_context_parallel import ContextParallelPlugin
from accel_context_parallel.attention import Rings, Sequences
from accel_context_parallel.models import own_positions
from accel_context_parallel.sequence import Part, causal_mask, documents_between, length_of, part, positions
from accel_core import Accelerator, AccelError, ParallelismConfig, TorchDynamoPlugin

CPU = torch.device("cpu")


class Pair(NamedTuple):
    ids: torch.Tensor
    name: str


def assert_same(found, expected):
    torch.testing.assert_close(found[0], expected[0], rtol=2e-4, atol=2e-5)
    torch.testing.assert_close(found[1], expected[1], rtol=5e-3, atol=5e-4)


# -- training equals the plain loop ----------------------------------------------------------------


@pytest.mark.needs("accel-ddp")
@pytest.mark.parametrize("causal", [True, False])
def test_losses_and_weights_equal_the_plain_loop(causal, run_processes):
    for found in run_processes(cp_problem.ours, causal, world=2):
        assert_same(found, cp_problem.plain(causal))
        assert found[2] == (4, LENGTH // 2)


@pytest.mark.needs("accel-ddp")
def test_so_they_do_through_forward_backward(run_processes):
    for found in run_processes(cp_problem.ours, True, 4, 7, "forward_backward", world=2):
        assert_same(found, cp_problem.plain())


@pytest.mark.needs("accel-ddp")
def test_so_they_do_where_batches_are_shared_out_by_hand(run_processes):
    for found in run_processes(cp_problem.by_hand, world=2):
        assert_same(found, cp_problem.plain())
        assert found[2] == (4, LENGTH // 2)


@pytest.mark.needs("accel-ddp")
@pytest.mark.parametrize("form", ["accumulate", "forward_backward", "by hand"])
def test_a_loop_that_leaves_the_positions_to_the_model_trains_on_those_of_its_part(form, run_processes):
    for found in run_processes(cp_problem.without_positions, form, world=2):
        assert_same(found, cp_problem.plain(epochs=3))


@pytest.mark.needs("accel-ddp")
@pytest.mark.parametrize(
    ("model", "derive", "names"),
    [
        (cp_problem.Adapted, True, ("input_ids",)),
        (cp_problem.OfAnotherName, True, ("input_ids", "position_ids")),
    ],
)
def test_a_model_may_hand_positions_on_or_take_them_by_another_name(model, derive, names, run_processes):
    with torch.no_grad():
        whole = Gpt()(default_collate(samples()[:4])["input_ids"])
    for logits, rank in run_processes(cp_problem.first_logits, model, derive, *names, world=2):
        torch.testing.assert_close(logits, whole[:, positions(LENGTH, 2, CPU)[rank]], rtol=1e-4, atol=1e-5)


@pytest.mark.needs("accel-ddp")
def test_a_model_that_takes_no_positions_is_refused_unless_it_has_none(run_processes):
    for model in (cp_problem.WithoutPositions, cp_problem.OfAnotherName):
        for said, _ in run_processes(cp_problem.first_logits, model, True, "input_ids", world=2):
            assert f"the forward of {model.__name__} takes no position_ids" in said
            assert "cp.derive: false" in said
    for found, _ in run_processes(
        cp_problem.first_logits, cp_problem.WithoutPositions, False, "input_ids", world=2
    ):
        assert isinstance(found, torch.Tensor)


@pytest.mark.needs("accel-compat")
def test_so_does_a_script_for_accelerate(run_processes):
    for found in run_processes(cp_problem.as_for_accelerate, world=2):
        assert_same(found, cp_problem.plain())


def data_and_context():
    return cp_problem.ours(batch_size=2, size=2)


@pytest.mark.needs("accel-ddp")
def test_pairs_of_ranks_share_sequences_and_read_apart_from_other_pairs(run_processes):
    for found in run_processes(data_and_context, world=4):
        assert_same(found, cp_problem.plain())
        assert found[2] == (2, LENGTH // 2)


def under_fsdp(batch_size):
    return cp_problem.ours(batch_size=batch_size, size=2, strategy="fsdp")


@pytest.mark.needs("accel-fsdp")
@pytest.mark.parametrize(("world", "shards"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.full)])
def test_weights_may_be_sharded_over_the_ranks_that_share_sequences(world, shards, run_processes):
    environment = {"ACCEL__PARALLELISM__DP_SHARD": str(shards)}
    for found in run_processes(under_fsdp, 4 // shards, world=world, environment=environment):
        assert_same(found, cp_problem.plain())


STAGES = {"ACCEL__PARALLELISM__PP": "2"}
HEAD = {**STAGES, "ACCEL__FSDP__PP_SPLIT_POINTS": '["head"]'}


def gridded():
    return cp_problem.ours(form="forward_backward", size=2, strategy="fsdp", epochs=3)


@pytest.mark.needs("accel-fsdp")
@pytest.mark.parametrize("grid", [SPLIT, STAGES, HEAD], ids=["split", "staged", "a stage without attention"])
def test_ranks_that_share_sequences_may_split_layers_or_run_stages(grid, run_processes):
    environment = {"ACCEL__PARALLELISM__DP_SHARD": "1", **grid}
    for found in run_processes(gridded, world=4, environment=environment):
        assert_same(found, cp_problem.plain(epochs=3))
        assert found[2] == (4, LENGTH // 2)


@pytest.mark.needs("accel-fsdp")
def test_a_pipeline_that_attends_nowhere_is_noticed(run_processes):
    for said in run_processes(cp_problem.unattentive, world=4, environment={**STAGES}):
        assert "never called torch.nn.functional.scaled_dot_product_attention" in said


@pytest.mark.needs("accel-ddp")
@pytest.mark.parametrize("form", ["loop", "forward_backward"])
@pytest.mark.parametrize(("world", "rows"), [(2, 4), pytest.param(4, 2, marks=pytest.mark.full)])
def test_sums_are_divided_by_the_tokens_of_all_parts(world, rows, form, run_processes):
    wanted = cp_problem.plain_of_tokens()
    for found in run_processes(of_tokens, rows, form, world=world):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def of_tokens(rows, form):
    return cp_problem.ours_of_tokens(rows, form, size=2)


def alone():
    return cp_problem.ours(strategy="single")


def test_one_process_shares_with_nobody(run_processes):
    (found,) = run_processes(alone, world=1)
    assert_same(found, cp_problem.plain())


def compiled():
    return cp_problem.ours(epochs=1, dynamo_plugin=TorchDynamoPlugin(backend="eager"))


@pytest.mark.needs("accel-ddp")
@pytest.mark.filterwarnings("ignore:.*lru_cache")  # torch traces what it would keep
def test_a_whole_model_may_be_compiled(run_processes):
    for found in run_processes(compiled, world=2):
        assert_same(found, cp_problem.plain(epochs=1))


@pytest.mark.needs("accel-ddp")
def test_attention_that_backward_computes_again_is_of_the_whole_sequence(run_processes):
    for kept, computed_again in run_processes(cp_problem.recomputed, world=2):
        torch.testing.assert_close(computed_again, kept)


@pytest.mark.needs("transformers")
def test_a_transformers_model_with_its_own_loss_trains_as_in_one_process(run_processes):
    (whole,) = run_processes(cp_problem.llama, False, world=1)
    for left_out in ([], ["position_ids"]):
        for shared in run_processes(cp_problem.llama, True, left_out, world=2):
            torch.testing.assert_close(shared, whole, rtol=2e-4, atol=2e-5)


@pytest.mark.needs("accel-ddp")
def test_evaluation_without_gradients_needs_no_step(run_processes):
    batch = default_collate(samples()[:4])
    with torch.no_grad():
        whole = Gpt()(batch["input_ids"])
    for logits, where in run_processes(cp_problem.evaluation, world=2):
        torch.testing.assert_close(logits, whole[:, where[0]], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "make", [lambda: positions(10, 1, CPU), lambda: causal_mask(10, 1, 0, CPU)], ids=["positions", "mask"]
)
def test_what_an_evaluation_in_inference_mode_makes_serves_training_too(make):
    with torch.inference_mode():
        made = make()

    assert make() is made
    assert not made.is_inference()


@pytest.mark.needs("accel-ddp")
def test_forwards_of_other_sequences_than_the_batchs_see_their_own_only(run_processes):
    for agree in run_processes(cp_problem.beside, world=2):
        assert agree == [True] * 6


class Ring:
    """Stands for torch's ring attention, which has no kernel for a CPU."""

    def attend(self, *given, **options):
        return "by rings"


def ways_of_attention():
    """How a group of one attends: each way, and the error of a way that the rings do not serve."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh, (query, key, value) = init_device_mesh("cpu", (1,)), torch.randn(3, 1, 2, 4, 8)
    rings = Sequences(mesh, 4, Ring())
    both = F.scaled_dot_product_attention(query, key, value)
    found = {
        "causal": rings.attend(query, key, value, None, 0.0, True),
        "both directions": torch.equal(rings.attend(query, key, value, None, 0.0, False), both),
    }
    with pytest.raises(AccelError) as caught:
        Sequences(mesh, 4, Ring(), only_rings=True).attend(query, key, value, None, 0.0, False)
    found["alltoall"] = str(caught.value)
    before = F.scaled_dot_product_attention
    made = Rings(mesh, "alltoall")
    found["replaced"] = F.scaled_dot_product_attention is not before
    made.close()
    found["left replaced"] = F.scaled_dot_product_attention is not before
    dist.destroy_process_group()
    return found


def test_rings_serve_causal_attention_and_keys_are_gathered_for_all_else(run_processes):
    (found,) = run_processes(ways_of_attention, world=1)
    assert found["causal"] == "by rings"
    assert found["both directions"]
    assert found["alltoall"].endswith("set cp.rotate_method: allgather")


def test_torchs_rings_leave_the_function_of_torch_alone(run_processes):
    (found,) = run_processes(ways_of_attention, world=1)
    assert not found["replaced"]
    assert not found["left replaced"]


def with_alltoall():
    plugins = [ContextParallelPlugin(rotate_method="alltoall"), ParallelismConfig(cp=2)]
    accelerator = Accelerator(cpu=True, strategy="ddp", plugins=plugins)
    return cp_problem.complaint(accelerator.prepare, Gpt())


@pytest.mark.needs("accel-ddp")
def test_a_rotate_method_without_a_kernel_is_refused_by_name(run_processes):
    for said in run_processes(with_alltoall, world=2):
        assert "cp.rotate_method is alltoall, which torch's ring attention does not serve on cpu" in said


# -- no wait for a device --------------------------------------------------------------------------


def test_documents_and_padding_are_found_without_reading_from_the_device():
    """A tensor of the meta device has no numbers: to read one is an error."""
    whole = torch.zeros(2, 8, dtype=torch.long, device="meta")
    assert Part(8, whole).documents.shape == (2, 8)
    assert Part(8, whole).kept.shape == (2, 8)
    assert documents_between(torch.zeros(4, dtype=torch.int32, device="meta"), 8).shape == (1, 8)


def test_documents_are_told_apart_by_positions_or_by_boundaries():
    where = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2]])
    boundaries = torch.tensor([0, 3, 5, 8], dtype=torch.int32)
    assert Part(8, where).documents.tolist() == [[0, 0, 0, 1, 1, 2, 2, 2]]
    assert documents_between(boundaries, 8).tolist() == [[0, 0, 0, 1, 1, 2, 2, 2]]
    assert Part(8, torch.arange(8)[None]).documents is None


# -- batches ---------------------------------------------------------------------------------------


@settings(derandomize=True, deadline=None)
@given(pieces=st.integers(1, 3), ranks=st.integers(1, 8))
def test_each_token_is_of_one_rank_and_heads_go_with_tails(pieces, ranks):
    length = 2 * ranks * pieces
    where = positions(length, ranks, torch.device("cpu"))
    assert sorted(where.flatten().tolist()) == list(range(length))
    assert len(set(where.sum(dim=1).tolist())) == 1, "causal work is not balanced"
    tokens = torch.arange(2 * length).view(2, length)
    assert torch.equal(part(tokens, 1, ranks - 1, ranks), tokens[:, where[-1]])


@pytest.mark.needs("accel-ddp")
def test_what_has_a_sequence_is_shared_whatever_the_batch_is(run_processes):
    ids = torch.arange(8).view(2, 4)
    mine = ids[:, [0, 3]]
    for batch, buffers in [(Pair(ids, "x"), {"0": 1}), ([ids, "x"], {0: 1})]:
        found = run_processes(cp_problem.placed, batch, buffers, world=2)[0]
        assert type(found) is type(batch)
        assert torch.equal(found[0], mine)
        assert found[1] == "x"
    assert torch.equal(run_processes(cp_problem.placed, ids, {"0": 1}, world=2)[0], mine)


@pytest.mark.needs("accel-ddp")
def test_positions_that_restart_mean_to_a_model_of_its_own_what_they_mean_in_one_process(run_processes):
    """Its attention is causal over the row: nothing in the program tells documents apart."""
    for found in run_processes(cp_problem.restarting, world=2):
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.needs("accel-ddp")
def test_a_causal_loss_that_would_shift_the_labels_of_a_part_is_refused(run_processes):
    pytest.importorskip("transformers")
    for said in run_processes(cp_problem.llama_that_shifts, "causal", world=2):
        assert said.startswith("cp: LlamaForCausalLM is given labels without shift_labels")


@pytest.mark.needs("accel-ddp")
def test_a_loss_that_does_not_shift_takes_the_labels_of_a_part(run_processes):
    pytest.importorskip("transformers")
    said = run_processes(cp_problem.llama_that_shifts, "masked", world=2)
    assert not any("shift_labels" in (each or "") for each in said), said


@pytest.mark.needs("accel-ddp")
def test_positions_and_the_labels_after_a_piece_are_given(run_processes):
    ids = torch.arange(10, 18).view(1, 8)
    batch = {"input_ids": ids, "labels": ids, "id": 5}
    found = run_processes(cp_problem.placed, batch, {"input_ids": 1, "labels": 1}, world=2)[1]
    assert found["position_ids"].tolist() == [[2, 3, 4, 5]]
    assert found["shift_labels"].tolist() == [[13, 14, 15, 16]]
    assert found["id"] == 5
    assert set(batch) == {"input_ids", "labels", "id"}


@pytest.mark.needs("accel-ddp")
def test_they_follow_the_dimension_of_the_sequence(run_processes):
    """In batches whose rows are tokens, and in labels of several words per token."""
    ids = torch.arange(10, 18).view(8, 1).expand(8, 4)
    batch, buffers = {"input_ids": ids, "labels": ids}, {"input_ids": 0, "labels": 0}
    found = run_processes(cp_problem.placed, batch, buffers, world=2)[0]
    assert found["shift_labels"].tolist() == [[token] * 4 for token in (11, 12, 17, -100)]
    assert found["position_ids"].tolist() == [[place] * 4 for place in (0, 1, 6, 7)]
    words = torch.arange(16).view(1, 8, 2)
    batch, buffers = {"input_ids": words, "labels": words}, {"input_ids": 1, "labels": 1}
    found = run_processes(cp_problem.placed, batch, buffers, world=2)[0]
    assert found["shift_labels"].tolist() == [[[2, 3], [4, 5], [14, 15], [-100, -100]]]
    assert found["position_ids"].tolist() == [[0, 1, 6, 7]]


@pytest.mark.needs("accel-ddp")
def test_a_batch_without_sequences_stays_whole(run_processes):
    found = run_processes(cp_problem.placed, {"pixels": torch.ones(2, 4)}, {"input_ids": 1}, world=2)
    assert [each["pixels"].shape for each in found] == [(2, 4), (2, 4)]


# -- mistakes --------------------------------------------------------------------------------------


@pytest.mark.needs("accel-ddp")
def test_what_would_train_something_else_is_an_error_on_every_rank(run_processes):
    said = {
        "outside of a step": "accelerator.accumulate(model, batch=batch)",
        "part of a part": "7 queries and 7 keys per rank; 2 ranks share sequences of 16",
        "mask": "attention with a mask",
        "no attention": "never called torch.nn.functional.scaled_dot_product_attention",
        "odd length": "input_ids 17",
        "two lengths": "mask 32",
        "documents": "packed rows (seq_idx)",
        "keys of its own": "3 queries and 3 keys per rank; 2 ranks share sequences of 16",
        "nobody's batch": "pass the loader's own batch",
        "shared twice": "the loader has shared this batch out already",
    }
    for found in run_processes(cp_problem.mistakes, world=2):
        assert found.keys() == said.keys()
        for mistake, words in said.items():
            assert words in found[mistake], mistake


class OwnPositions(nn.Module):
    """Position embeddings as RoBERTa's (a padding index) or OPT's (an offset)."""

    def __init__(self, offset: int | None = None) -> None:
        super().__init__()
        self.position_embeddings = nn.Embedding(8, 4, padding_idx=None if offset else 1)
        if offset:
            self.position_embeddings.offset = offset


@pytest.mark.parametrize("offset", [None, 2])
def test_a_model_that_makes_positions_from_padding_is_refused(offset):
    (reason,) = own_positions(OwnPositions(offset))
    assert "makes positions from the padding of whole rows (position_embeddings)" in reason


def test_positions_that_count_from_0_are_served():
    model = nn.ModuleDict({"position_embeddings": nn.Embedding(8, 4)})
    assert [*own_positions(model)] == []


def test_an_entry_without_a_sequence_is_named():
    batch = {"input_ids": torch.zeros(2, 8), "labels": torch.zeros(2)}
    with pytest.raises(AccelError, match="labels has the shape \\(2,\\), and cp.buffers says"):
        length_of(batch, {"input_ids": 1, "labels": 1}, 2)

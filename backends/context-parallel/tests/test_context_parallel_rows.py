"""Rows of several documents, windows and padding train as transformers trains them in one process."""

from __future__ import annotations

import cp_rows
import pytest
import torch

pytestmark = [pytest.mark.needs("accel-ddp"), pytest.mark.needs("transformers")]


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-5)


@pytest.fixture(scope="module")
def trained(run_processes):
    return run_processes(cp_rows.cases, world=2)


@pytest.mark.parametrize("case", cp_rows.CASES, ids=" ".join)
def test_rows_train_as_in_one_process(case, trained):
    for found in trained:
        assert_same(found[case], cp_rows.plain(*case[:2]))


def test_documents_stay_apart_in_blocks_that_backward_computes_again(trained):
    for found in trained:
        assert_same(found["checkpointed"], cp_rows.plain("window", "packed"))


def test_the_host_reads_no_number_of_a_model_of_transformers(trained):
    assert [found["reads"] for found in trained] == [[], []]


def test_models_and_arguments_that_would_be_wrong_on_a_part_are_refused_by_name(trained):
    said = {
        "eager": 'load the model with attn_implementation="sdpa"',
        "chunked": "LlamaForCausalLM has layers of chunked_attention",
        "positions of its own": "position_ids that are not the batch's own",
        "a mask of blocks": "an attention_mask of shape (2, 1, 16, 16)",
    }
    for found in trained:
        assert found["refused"].keys() == said.keys()
        for mistake, words in said.items():
            assert words in found["refused"][mistake], mistake

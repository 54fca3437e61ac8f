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

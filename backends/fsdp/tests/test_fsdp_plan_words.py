"""Each word that plans are written in: a model that is split by it trains as in one process."""

from __future__ import annotations

import grid_job
import plan_job
import pytest
import torch

from accel_fsdp.tensor.plans import WORDS

TP = grid_job.environment({"tp": 2})


@pytest.fixture(scope="module")
def found(run_processes):
    return run_processes(plan_job.split_words, list(WORDS), world=2, environment=TP, timeout=200)


def assert_as_plain(ranks, word):
    losses, weights = plan_job.plain_words(word)
    for rank in ranks:
        assert rank[word][0] == pytest.approx(losses, rel=1e-12)
        assert rank[word][1].keys() == weights.keys()
        for key, value in weights.items():
            torch.testing.assert_close(rank[word][1][key], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize("word", WORDS)
def test_a_word_changes_no_number(word, found):
    assert_as_plain(found, word)

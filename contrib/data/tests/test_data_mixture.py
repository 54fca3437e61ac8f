"""Mixture: exact proportions per block, one order for all, a position at any world."""

from __future__ import annotations

from collections import Counter

import pytest

from accel_data import Mixture

SOURCES = [range(10), range(100, 130), range(1000, 1007)]


def test_each_block_has_each_sources_share():
    mixture = Mixture(SOURCES, [0.5, 0.3, 0.2], seed=0, length=1000)
    for block in range(0, 1000, 10):
        counts = Counter(mixture.source_of(index)[0] for index in range(block, block + 10))
        assert counts == {0: 5, 1: 3, 2: 2}


def test_a_source_repeats_no_sample_before_all_were_taken():
    mixture = Mixture(SOURCES, [1, 1, 1], seed=0, length=300)
    taken = [at for source, at in map(mixture.source_of, range(300)) if source == 0]
    for start in range(0, 100, 10):
        assert sorted(taken[start : start + 10]) == list(range(10))


def test_epochs_continue_and_a_copy_finds_the_same_samples_in_any_order():
    mixture, other = (Mixture(SOURCES, [2, 1, 1], seed=3, length=50) for _ in range(2))
    epochs = []
    for epoch in range(2):
        mixture.set_epoch(epoch)
        epochs.append([mixture[index] for index in range(50)])
    assert epochs[0] != epochs[1]
    other.set_epoch(1)
    assert [other[index] for index in reversed(range(50))] == epochs[1][::-1]


@pytest.mark.parametrize(("weights", "sources"), [([1], SOURCES), ([1, 0, 1], SOURCES), ([1, 1], [[1], []])])
def test_what_cannot_be_mixed_is_refused(weights, sources):
    with pytest.raises(ValueError, match=r"weight|empty"):
        Mixture(sources, weights, seed=0)

"""Rank 0 waits for the ranks that are at work, and for no others."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore

from accel_core.checkpoint import votes as module
from accel_core.checkpoint.votes import Votes

TIMEOUT = 8.0


class Clock:
    """Time that passes in `sleep` alone."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_many_ranks_that_are_gone_are_given_up_in_the_time_of_one(clock: Clock) -> None:
    votes = Votes(HashStore(), TIMEOUT)
    for rank in range(8):
        votes.publish(f"alive-{rank}", {"beat": 0})
    heard = votes.poll_all({rank: f"vote-{rank}" for rank in range(8)}, TIMEOUT)
    assert heard == dict.fromkeys(range(8))
    assert clock.now < 2 * TIMEOUT


def test_a_rank_that_says_that_it_is_at_work_is_waited_for(clock: Clock) -> None:
    votes = Votes(HashStore(), TIMEOUT)
    votes.publish("alive-1", {"beat": 0})

    def work(seconds: float) -> None:
        clock.now += seconds
        votes.publish("alive-1", {"beat": int(clock.now)})
        if clock.now > 5 * TIMEOUT:
            votes.publish("vote-1", {"bytes": 1})

    clock.sleep = work  # type: ignore[method-assign]
    votes.publish("vote-0", {"bytes": 0})
    assert votes.poll_all({0: "vote-0", 1: "vote-1"}, TIMEOUT) == {0: {"bytes": 0}, 1: {"bytes": 1}}


def test_a_rank_that_never_began_is_given_up_at_the_deadline(clock: Clock) -> None:
    assert Votes(HashStore(), TIMEOUT).poll_all({1: "vote-1"}, TIMEOUT) == {1: None}
    assert clock.now < 1.1 * TIMEOUT

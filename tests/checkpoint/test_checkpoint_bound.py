"""A work is given up when its store is silent, not because it takes long."""

from __future__ import annotations

import time

import pytest

from accel_core.checkpoint.bound import Bound, NoAnswerError


def test_alone_a_store_that_is_slow_but_answers_is_waited_for() -> None:
    bound = Bound(1.0, renewed=True)

    for _ in range(4):
        bound.ask("read", lambda: time.sleep(0.4))


def test_alone_a_store_that_is_silent_is_given_up() -> None:
    bound = Bound(0.2, renewed=True)

    with pytest.raises(NoAnswerError, match="no answer to read within 0.2 s"):
        bound.ask("read", lambda: time.sleep(2))
    with pytest.raises(NoAnswerError, match="nothing is asked any more"):
        bound.ask("read", lambda: None)


def test_where_other_ranks_wait_all_answers_come_in_time_together() -> None:
    bound = Bound(1.0)
    bound.ask("read", lambda: time.sleep(0.6))

    with pytest.raises(NoAnswerError):
        bound.ask("read", lambda: time.sleep(0.6))

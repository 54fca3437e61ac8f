"""Messages between ranks: a rank waits for the ranks that are at work, and for no others."""

from __future__ import annotations

import time

import pytest
from torch.distributed import HashStore

from accel_core.storage import ranks as module
from accel_core.storage.ranks import StoreMailbox
from accel_testing.patience import patience

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


def mailbox(rank: int = 0, store: HashStore | None = None) -> StoreMailbox:
    return StoreMailbox(HashStore() if store is None else store, rank, TIMEOUT, "save")


def test_many_ranks_that_are_gone_are_given_up_in_the_time_of_one(clock: Clock) -> None:
    mail = mailbox()
    for rank in range(8):
        mail.put(f"alive-{rank}", {"beat": 0})
    heard = mail.wait({rank: f"vote-{rank}" for rank in range(8)}, TIMEOUT)
    assert heard == dict.fromkeys(range(8))
    assert clock.now < 2 * TIMEOUT


def test_a_rank_that_says_that_it_is_at_work_is_waited_for(clock: Clock) -> None:
    mail = mailbox()
    mail.put("alive-1", {"beat": 0})

    def work(seconds: float) -> None:
        clock.now += seconds
        mail.put("alive-1", {"beat": int(clock.now)})
        if clock.now > 5 * TIMEOUT:
            mail.put("vote-1", {"bytes": 1})

    clock.sleep = work  # type: ignore[method-assign]
    mail.put("vote-0", {"bytes": 0})
    assert mail.wait({0: "vote-0", 1: "vote-1"}, TIMEOUT) == {0: {"bytes": 0}, 1: {"bytes": 1}}


def test_a_rank_that_never_began_is_given_up_at_the_deadline(clock: Clock) -> None:
    assert mailbox().wait({1: "vote-1"}, TIMEOUT) == {1: None}
    assert clock.now < 1.1 * TIMEOUT


def test_a_rank_that_sent_and_is_gone_since_is_heard(clock: Clock) -> None:
    store = HashStore()
    mailbox(1, store).put("vote-1", {"error": "no room"})
    heard = mailbox(0, store).wait({1: "vote-1", 2: "vote-2"}, TIMEOUT)
    assert heard == {1: {"error": "no room"}, 2: None}


class CountingStore(HashStore):
    """A store that counts its requests."""

    def __init__(self) -> None:
        super().__init__()
        self.requests = 0

    def check(self, keys: list[str]) -> bool:
        self.requests += 1
        return super().check(keys)

    def get(self, key: str) -> bytes:
        self.requests += 1
        return super().get(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.requests += 1
        return super().multi_get(keys)


def test_waiting_for_many_ranks_that_have_sent_takes_two_requests() -> None:
    store = CountingStore()
    mail = mailbox(store=store)
    for rank in range(100):
        mail.put(f"vote-{rank}", {"bytes": rank})
    heard = mail.wait({rank: f"vote-{rank}" for rank in range(100)}, TIMEOUT)
    assert heard == {rank: {"bytes": rank} for rank in range(100)}
    assert store.requests == 2


def test_waiting_for_no_rank_returns_at_once() -> None:
    assert mailbox().wait({}, TIMEOUT) == {}


def test_boxes_of_one_store_have_keys_of_their_own_and_leave_none_behind() -> None:
    store = HashStore()
    first, second = mailbox(0, store), mailbox(0, store).under("other")
    first.put("vote-0", {"of": "first"})
    assert not second.has("vote-0")
    second.put("vote-0", {"of": "second"})
    assert (first.read("vote-0"), second.read("vote-0")) == ({"of": "first"}, {"of": "second"})
    for each in (first, second):
        each.delete("vote-0", "never-put")
    assert store.num_keys() == 0


def test_a_rank_is_alive_while_it_is_at_work_and_not_after() -> None:
    box = StoreMailbox(HashStore(), 3, 0.04, "save")
    with box.alive():
        first = _next_beat(box, -1)
        assert _next_beat(box, first) > first
    last = box.read("alive-3")["beat"]
    time.sleep(0.05)
    assert box.read("alive-3")["beat"] <= last + 1  # one may have been under way


def _next_beat(box: StoreMailbox, before: int) -> int:
    end = time.monotonic() + patience(10)
    while time.monotonic() < end:
        if box.has("alive-3") and box.read("alive-3")["beat"] > before:
            return int(box.read("alive-3")["beat"])
        time.sleep(0.001)
    raise AssertionError("it says nothing")

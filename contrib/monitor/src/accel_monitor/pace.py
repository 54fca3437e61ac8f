"""Ranks that others wait for: each publishes its pace, rank 0 compares.

Ranks that exchange gradients have the same step time, for each waits for the latest. What tells the latest is
its own time: from the end of a step to the next one's last backward, without the time in backwards, and in
optimizers. It is alike on all where others wait in their forward for one that is slow in its optimizer.
Sampled steps have it anyway; the watch's thread publishes it and compares.
"""

from __future__ import annotations

import json
import platform
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from accel_core import tell

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from accel_core import World

__all__ = ["Pace"]

PUBLISH_SECONDS: Final = 10.0
SAMPLES: Final = 3
"""Least samples of a publication.

Their median leaves out one that holds a pause or a long batch.
"""
MOST_SAMPLES: Final = 1000
"""The last ones before a publication, which may be late."""
PARTS: Final = ("own", "data")
"""Times of a step that are compared.

Where the forward waits for ranks as well, `own` is alike on all, and `data` tells.
"""
LATE: Final = 0.2
"""Share of a step by which a late rank takes longer than the median one."""
LATE_SECONDS: Final = 0.005
"""Least seconds of that."""
TIMES: Final = 3
"""Times late, less times not late, at which a rank counts as slow."""
MOST: Final = 16
"""Ranks in the record, the slowest first."""
ABSENT: Final = "-"


class Pace:
    """The pace of this rank, and on rank 0 of all.

    On rank 0 the record takes `slowest`, the last comparison, and
    `said`, a text for each change.
    """

    def __init__(self, world: World) -> None:
        self.slowest: list[dict[str, Any]] = []
        self.said: deque[str] = deque()
        self.ended = False
        self._rank, self._ranks = world.rank, range(world.size)
        self._key = "pace"
        self._samples: deque[Mapping[str, Any]] = deque(maxlen=MOST_SAMPLES)
        self._memory: Mapping[str, int] = {}
        self._at = time.monotonic()
        self._is_published = False
        self._known: dict[int, tuple[str, bool]] = {}
        """Rank -> its last publication, and whether it has been compared twice."""
        self._late: dict[int, int] = {}
        self._slow: set[int] = set()

    def note(self, sample: Mapping[str, Any]) -> None:
        """Keep a sample of a step for the next publication."""
        self._samples.append(sample)

    def publish(self, store: Store) -> None:
        """Publish, if it is time, and compare. The watch calls it, in its thread."""
        if self.ended:
            if self._is_published:  # once: another run may keep the watch
                self._is_published = False
                store.delete_key(f"{self._key}/{self._rank}")
        elif time.monotonic() - self._at >= PUBLISH_SECONDS and len(self._samples) >= SAMPLES:
            self._at, self._is_published = time.monotonic(), True
            store.set(f"{self._key}/{self._rank}", json.dumps(self._summary(), default=str))
            if self._rank == 0:
                self._compare(store)

    def _summary(self) -> dict[str, Any]:
        """Return the samples since the last publication as one."""
        from statistics import median  # late: start-up need not wait for it

        samples = [self._samples.popleft() for _ in range(len(self._samples))]
        seconds = [sample["seconds"] for sample in samples if sample["seconds"]]
        self._memory = next((each["memory"] for each in samples[::-1] if "memory" in each), self._memory)
        return {
            "rank": self._rank,
            "host": platform.node(),
            "time": time.time(),
            "step": samples[-1]["step"],
            "seconds": sum(seconds) / len(seconds) if seconds else None,
            "own": median(sample["own"] for sample in samples),
            "data": median(sample["split"].get("data", 0.0) for sample in samples),
            "memory": self._memory,
        }

    def _compare(self, store: Store) -> None:
        """Find out which ranks are slow, and say so where that has changed."""
        from statistics import median_low  # late: start-up need not wait for it

        published = [*self._published(store)]
        paces = {pace["rank"]: pace for pace, _ in published}
        usual = {part: median_low(pace[part] for pace in paces.values()) for part in PARTS}
        for rank, pace in ((pace["rank"], pace) for pace, is_new in published if is_new):
            behind = max(pace[part] - usual[part] for part in PARTS)
            is_late = behind > max(LATE_SECONDS, LATE * (pace["seconds"] or 0.0))
            self._late[rank] = min(TIMES, max(0, self._late.get(rank, 0) + (1 if is_late else -1)))
        kept = {rank for rank in self._slow if self._late[rank]}
        slow = kept | {rank for rank, times in self._late.items() if times == TIMES}
        ordered = sorted(paces.values(), key=lambda pace: -max(pace[part] - usual[part] for part in PARTS))
        self.slowest = [{**pace, "slow": pace["rank"] in slow} for pace in ordered[:MOST]]
        if slow != self._slow:
            self._slow = slow
            named = [_in_words(pace, usual) for pace in ordered if pace["rank"] in slow]
            text = f"slow: {'; '.join(named[:MOST])}" if slow else "no rank is slow any more"
            self.said.append(text)
            tell(f"accel: {text}\n")

    def _published(self, store: Store) -> Iterator[tuple[Mapping[str, Any], bool]]:
        """Yield what ranks have published, and whether it has not been compared yet.

        Ranks publish at their own times: one that is a little later than this comparison is in it with its
        publication before.
        """
        for rank in self._ranks:
            # A read that does not wait for a key that is not there, as that of a rank that has ended.
            text = store.compare_set(f"{self._key}/{rank}", ABSENT, ABSENT).decode()
            known, is_worn = self._known.get(rank, (ABSENT, True))
            is_new = text != known
            if text != ABSENT and (is_new or not is_worn):
                self._known[rank] = text, not is_new
                yield json.loads(text), is_new


def _in_words(pace: Mapping[str, Any], usual: Mapping[str, float]) -> str:
    return (
        f"rank {pace['rank']} on {pace['host']}, for which the others wait: {pace['own']:.3g} s of a step"
        f" outside its backward, {pace['data']:.3g} s of it for data; the median rank takes"
        f" {usual['own']:.3g} s and {usual['data']:.3g} s"
    )

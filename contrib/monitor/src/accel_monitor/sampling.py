"""Samples of steps: time, rates and memory of every n-th step."""

from __future__ import annotations

import math
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from accel_core import PreparedLoader, Run, Unit, Window

__all__ = ["Reads", "Sampler"]

CLOSE: Final = 0.05
"""Least seconds between two samples at the start of a run."""
SPREAD: Final = 2.5
"""The least seconds grow by CLOSE each time as many seconds have passed."""
FAR: Final = 20
"""Times CLOSE that the least seconds grow to."""
AHEAD: Final = 8
"""Times `every` steps, at most, between two looks at the clock."""
MEMORY_SECONDS: Final = 1.0
"""Seconds between two looks at the memory, which may take long."""
MOST_MARKS: Final = 100_000
"""A step with more, such as an evaluation before the first step, is not sampled."""
WAITS: Final = "collectives"
"""Part of a step that went to collective operations of the Accelerator."""
BEGUN: Final[Mapping[str, str]] = {"backward": "forward", "forward_backward": "other"}
"""Part of a step that ends where one of these calls begins."""


class Sampler:
    """Count steps of one optimizer, the first that steps; sample the first step and every n-th.

    On a device with events the times are the device's, read once it has come so far: nothing waits.
    count: steps that are done. counted: that optimizer; None until there is one. next: after so many steps
    the next sample may begin. marks: (what ended, when) in the step that is sampled, None in any other.
    """

    def __init__(
        self,
        run: Run,
        every: int,
        write: Callable[[Mapping[str, Any]], None],
        fail: Callable[[Exception], None],
    ) -> None:
        self.run, self.count, self.next = run, 0, -1
        self.counted: Optimizer | None = None
        self.marks: list[tuple[str, Any]] | None = None
        self.reads: Callable[[], Reads | None] = lambda: None
        self._every, self._write, self._fail = every, write, fail
        self._begun = time.perf_counter()
        self._last = (-math.inf, 0)
        """When, and at which step, the last sample was taken."""
        self._looked = -MEMORY_SECONDS
        self._waiting: deque[tuple[Any, Callable[[], None]]] = deque()
        self._has_events: bool | None = None
        self._events_have_times = True
        self._records_graph: Callable[[], bool] = bool
        self._arm()
        self.marks = []  # the first step begins with what happens first

    # -- steps ------------------------------------------------------------------------------------

    def move_to(self, count: int) -> None:
        """Take this as the number of steps that are done."""
        self.count, self._last = count, (time.perf_counter(), count)
        self._arm()

    def forget(self, unit: Unit) -> None:
        """Count another optimizer where this unit has the one that is counted."""
        if any(optimizer is self.counted for optimizer in unit.optimizers):
            self.counted = None

    def end(self) -> None:
        """Write what the device still has to finish: the one place that waits for it."""
        self.marks = None
        for event, _ in self._waiting:
            event.synchronize()
        self._write_finished()

    def turn(self, unit: Unit, optimizer: Optimizer, applied: bool) -> None:
        """End the sample of a step, or begin that of the next."""
        if self.counted is None:
            self.counted, self.count = optimizer, self.count + 1
        self.mark("optimizer")
        if optimizer is self.counted:
            if self.marks is not None:
                self._finish(unit, optimizer, applied)
            if self.count == self.next:
                self._arm()

    # -- a sample ---------------------------------------------------------------------------------

    def _arm(self) -> None:
        """Sample the next step, unless the last sample is too recent."""
        self.marks = None
        done = self.count + 1
        self.next = (done // self._every + 1) * self._every - 1
        now, (last, before) = time.perf_counter(), self._last
        pause, passed = CLOSE * min(FAR, 1 + (now - self._begun) / SPREAD), now - last
        if passed >= pause:
            self.marks = [("", self._now())]
        elif passed > 0:  # half of the way, at the pace until now: the next steps may be slower
            steps = (self.count - before) * (pause / passed - 1) / 2
            self.next += min(AHEAD, int(steps / self._every)) * self._every

    def mark(self, ended: str) -> None:
        """Note in a sampled step that something has ended now."""
        if self.marks is not None:
            try:
                is_replayed = self._events() and self._records_graph()  # which none of this belongs to
                if is_replayed or len(self.marks) > MOST_MARKS:
                    self.marks = None
                else:
                    self.marks.append((ended, self._now()))
            except Exception as error:  # no error of the record may end the training
                self._fail(error)

    def _finish(self, unit: Unit, optimizer: Optimizer, applied: bool) -> None:
        """Put the sample of the step that has ended together."""
        now = time.perf_counter()
        since, before = self._last
        seconds = (now - since) / (self.count - before) if math.isfinite(since) else None
        self._last = (now, self.count)
        values = {"step": self.count, "seconds": seconds, **self._progress(unit, seconds)}
        values["lr"] = self.copied(optimizer.param_groups[0]["lr"])
        if not applied:
            values["skipped"] = True
        if now - self._looked >= MEMORY_SECONDS:
            self._looked, values["memory"] = now, self._memory()
            health = {} if self.run.world.rank else self.run.hooks["monitor.device_health"](self.run.device)
            if health:
                values["health"] = dict(health)
        together = None if unit.window.items is None else self.copied(unit.window.items[1])
        marks, self.marks = self.marks or [], None

        def write() -> None:
            if together is not None and seconds:
                values["items_per_second"] = float(together) / seconds
            split = self._split(marks)
            self._write({**values, "own": self._own(marks, split), "split": split})

        self.when_copied(write)

    def _progress(self, unit: Unit, seconds: float | None) -> dict[str, Any]:
        reads = self.reads()
        if reads is None:
            return {}
        samples = reads.loader.total_batch_size
        rate = samples * _micro_batches(unit.window) / seconds if samples and seconds else None
        return {"samples_per_second": rate, **reads.place()}

    def _memory(self) -> dict[str, int]:
        memory = dict(self.run.hooks.memory_stats(self.run.device))
        try:
            import resource
        except ImportError:  # Windows
            return memory
        unit = 1 if sys.platform == "darwin" else 1024
        return {**memory, "host_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}

    # -- values of the device, which nothing waits for --------------------------------------------

    def copied(self, value: Any) -> Any:
        """Return the number in a tensor of one element, or a copy on its way.

        The copy is whole once the device has done all that it was given by now.
        None for any other tensor, and for one on a device without events.
        """
        if not isinstance(value, torch.Tensor):
            return value
        if value.numel() != 1 or value.is_meta or hasattr(value, "to_local"):
            return None
        if value.device.type == "cpu":
            return value.item()
        return value.detach().to("cpu", non_blocking=True) if self._events() else None

    def when_copied(self, write: Callable[[], None]) -> None:
        """Write now, or once the device has done all that it was given by now."""
        if self._events():
            event = torch.Event(self.run.device)
            event.record()
            self._waiting.append((event, write))
            self._write_finished()
        else:
            write()

    def _write_finished(self) -> None:
        while self._waiting and self._waiting[0][0].query():
            self._waiting.popleft()[1]()

    def _now(self) -> Any:
        if not (self._events() and self._events_have_times):
            return time.perf_counter()
        event = torch.Event(self.run.device, enable_timing=True)
        event.record()
        return event

    def _split(self, marks: list[tuple[str, Any]]) -> dict[str, float]:
        """Return the seconds of a step by what they went to, once the device has done it."""
        split: dict[str, float] = {}
        for part, ((_, begun), (_, at)) in zip(_parts(marks), pairwise(marks), strict=True):
            try:
                seconds = at - begun if isinstance(at, float) else begun.elapsed_time(at) / 1000
            except RuntimeError:  # events without times: the next samples are by the clock
                self._events_have_times = False
                return {}
            split[part] = round(split.get(part, 0.0) + seconds, 7)
        return split

    def _own(self, marks: list[tuple[str, Any]], whole: Mapping[str, float]) -> float | None:
        """Return the seconds for which other ranks may have to wait.

        They are those until the last backward, outside backwards, and those in optimizers. None where no
        backward was noted. whole: the split of all of the step.
        """
        ends = [number for number, (ended, _) in enumerate(marks, 1) if "backward" in ended]
        split = self._split(marks[: ends[-1]]) if ends else {}
        until = [split.get(part, 0.0) for part in ("data", "forward", "other")]
        return math.fsum([*until, whole.get("optimizer", 0.0)]) if split else None

    def _events(self) -> bool:
        """Return whether the device has events."""
        if self._has_events is None:
            device = self.run.device
            self._has_events = device.type != "cpu" and self.run.mark_step is None
            try:
                if self._has_events:
                    torch.Event(device, enable_timing=True).record()
                    module = torch.get_device_module(device)
                    self._records_graph = getattr(module, "is_current_stream_capturing", bool)
            except Exception:  # devices without events say so in any way
                self._has_events = False
        return self._has_events


class Reads:
    """The batches of one loop, counted, and timed in a sampled step."""

    def __init__(self, batches: Iterator[Any], loader: PreparedLoader, done: int, sampler: Sampler) -> None:
        self.loader, self.count = loader, done
        self._batches, self._sampler = iter(batches), sampler
        self._self = weakref.ref(self)  # workers end with the loop, and its iterators
        try:
            self.total: int | None = len(loader)
        except TypeError:  # an iterable dataset without length
            self.total = None

    def place(self) -> dict[str, int | None]:
        """Return the epoch, counted from 0, the batches of it that are read, and all."""
        return {"epoch": self.loader.epoch, "batch": self.count, "batches": self.total}

    def __iter__(self) -> Reads:
        return self

    def __next__(self) -> Any:
        self._sampler.mark("other")
        batch = next(self._batches)
        self._sampler.mark("data")
        self._sampler.reads = self._self
        self.count += 1
        return batch


def _parts(marks: list[tuple[str, Any]]) -> Iterator[str]:
    """Return what each time between two marks went to.

    Where a collective cuts a part, what comes before it belongs to what ends next.
    """
    parts: list[str] = []
    part = "other"
    for ended, _ in reversed(marks[1:]):
        part = part if ended in ("", WAITS) else ended
        parts.append(ended if ended == WAITS else part)
    return reversed(parts)


def _micro_batches(window: Window) -> int:
    return window.index + 1 or window.size

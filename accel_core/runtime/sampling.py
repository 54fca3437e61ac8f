"""Samples of steps: time, loss and rates of every n-th step."""

from __future__ import annotations

import math
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.utils import clip_grad_norm_

from accel_core.contract.world import COLLECTIVES
from accel_core.training.step import step as apply_step

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from accel_core.contract.run import Run
    from accel_core.contract.unit import StepOutput, Unit
    from accel_core.contract.window import Window
    from accel_core.data.loader import PreparedLoader

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


class StepSampler:
    """Count steps of the run's first optimizer; sample the first and every n-th.

    The hooks of a sampled step are replaced for that step by ones that note the time around them. On a
    device with events the times are the device's, read once it has come so far: nothing waits.
    count: steps that are done.
    """

    def __init__(
        self,
        run: Run,
        every: int,
        write: Callable[[Mapping[str, Any]], None],
        fail: Callable[[Exception], None],
    ) -> None:
        self.run, self.count = run, 0
        self._prepared = run.prepared
        self._every, self._write, self._fail = every, write, fail
        self._next = -1
        self._begun = time.perf_counter()
        self._last = (-math.inf, 0)
        """When, and at which step, the last sample was taken."""
        self._looked = -MEMORY_SECONDS
        self._marks: list[tuple[str, Any]] | None = None
        """(what ended, when) in the step that is sampled; None in any other."""
        self._replaced: list[tuple[Any, str, Any]] = []
        self._noted: list[tuple[str, Unit, Any]] = []
        """(name, unit, value) of what passed by in that step."""
        self._waiting: deque[tuple[Any, Callable[[], None]]] = deque()
        self._has_events: bool | None = None
        self._events_have_times = True
        self._records_graph: Callable[[], bool] = bool
        self.reads: Callable[[], Reads | None] = bool  # type: ignore[assignment]  # none yet

    # -- steps ------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Count steps from now on; sample the first one."""
        self.run.use_step(self._step)
        if self._marks is not None or not self.count:
            self._arm()

    def move_to(self, count: int) -> None:
        """Take this as the number of steps that are done."""
        self.count, self._last = count, (time.perf_counter(), count)
        self._arm()

    def stop(self) -> None:
        """Count no more."""
        self._release()
        self.run.use_step(apply_step)

    def end(self) -> None:
        """Write what the device still has to finish: the one place that waits for it."""
        self._release()
        for event, _ in self._waiting:
            event.synchronize()
        self._write_finished()

    def _step(self, unit: Unit, optimizer: Optimizer, closure: Callable[[], Any] | None) -> bool:
        """Stand in for `step.step`: the same, counted."""
        if self._marks is not None:
            return self._sampled_step(unit, optimizer, closure)
        applied = apply_step(unit, optimizer, closure)
        if optimizer is self._prepared.counted:
            self.count = count = self.count + 1
            if count == self._next:
                self._turn(unit, optimizer, applied)
        return applied

    def _sampled_step(self, unit: Unit, optimizer: Optimizer, closure: Callable[[], Any] | None) -> bool:
        self.mark("other")
        applied = apply_step(unit, optimizer, closure)
        self.mark("optimizer")
        if optimizer is self._prepared.counted:
            self.count += 1
            self._turn(unit, optimizer, applied)
        return applied

    def _turn(self, unit: Unit, optimizer: Optimizer, applied: bool) -> None:
        """End the sample of a step, or begin that of the next."""
        try:
            if self._marks is not None:
                self._finish(unit, optimizer, applied)
            if self.count == self._next:
                self._arm()
        except Exception as error:  # no error of the record may end the training
            self._fail(error)

    # -- a sample ---------------------------------------------------------------------------------

    def _arm(self) -> None:
        """Sample the next step, unless the last sample is too recent."""
        self._release()
        done = self.count + 1
        self._next = (done // self._every + 1) * self._every - 1
        now, (last, before) = time.perf_counter(), self._last
        pause, passed = CLOSE * min(FAR, 1 + (now - self._begun) / SPREAD), now - last
        if passed < pause:
            if passed > 0:  # half of the way, at the pace until now: the next steps may be slower
                steps = (self.count - before) * (pause / passed - 1) / 2
                self._next += min(AHEAD, int(steps / self._every)) * self._every
            return
        for unit in self.run.units:
            plain = unit.steps.backward or (lambda unit, loss, boundary, options: loss.backward(**options))
            self._replace(unit.steps, "backward", partial(self._backward, plain))
            whole = partial(self._forward_backward, unit.steps.forward_backward)
            self._replace(unit.steps, "forward_backward", whole)
            clip = unit.steps.clip_gradients or (lambda _, *arguments: clip_grad_norm_(*arguments))
            self._replace(unit.steps, "clip_gradients", partial(self._clip, clip))
        self._marks = [("", self._now())]

    def _replace(self, steps: Any, hook: str, timed: Callable[..., Any]) -> None:
        self._replaced.append((steps, hook, getattr(steps, hook)))
        setattr(steps, hook, timed)

    def _release(self) -> None:
        """Bind the hooks again as they were."""
        while self._replaced:
            steps, hook, plain = self._replaced.pop()
            setattr(steps, hook, plain)
        self._marks, self._noted = None, []

    def mark(self, ended: str) -> None:
        """Note in a sampled step that something has ended now."""
        if self._marks is not None:
            try:
                if self._events() and self._records_graph():  # for replays, which none of this belongs to
                    self._release()
                else:
                    self._marks.append((ended, self._now()))
            except Exception as error:  # no error of the record may end the training
                self._fail(error)

    def _note(self, name: str, unit: Unit, value: Any) -> None:
        if self._marks is not None:
            try:
                self._noted.append((name, unit, self.copied(value)))
            except Exception as error:  # no error of the record may end the training
                self._fail(error)

    def _backward(self, plain: Callable[..., None], unit: Unit, loss: Any, *rest: Any) -> None:
        self.mark("forward")
        plain(unit, loss, *rest)
        self.mark("backward")
        self._note("loss", unit, loss)

    def _forward_backward(self, plain: Callable[..., StepOutput], unit: Unit, *rest: Any) -> StepOutput:
        self.mark("other")
        output = plain(unit, *rest)
        self.mark("forward_backward")
        if output.valid and not rest[-1]:
            self._noted.clear()  # its micro-batches', if these passed by
            self._note("whole", unit, output.loss)
        return output

    def _clip(self, plain: Callable[..., Any], unit: Unit, *rest: Any) -> Any:
        norm = plain(unit, *rest)
        self._note("grad_norm", unit, norm)
        return norm

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
            if not self.run.world.rank and (health := dict(self.run.hooks.device_health(self.run.device))):
                values["health"] = health
        window = unit.window
        together = None if window.items is None else self.copied(window.items[1])
        marks, noted = self._marks or [], self._noted
        # A loader's end cuts a window.
        short = window.size / _micro_batches(window) if window.items is None else 1.0
        self._release()

        def write() -> None:
            if together is not None and seconds:
                values["items_per_second"] = float(together) / seconds
            split = self._split(marks)
            own = {"own": self._own(marks, split)}
            self._write({**values, **own, "split": split, **_passed(noted, short)})

        self.when_copied(write)

    def _progress(self, unit: Unit, seconds: float | None) -> dict[str, Any]:
        reads = self.reads() or None
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

    def __init__(
        self, batches: Iterator[Any], loader: PreparedLoader, done: int, sampler: StepSampler
    ) -> None:
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
        part = part if ended in ("", COLLECTIVES) else ended
        parts.append(ended if ended == COLLECTIVES else part)
    return reversed(parts)


def _micro_batches(window: Window) -> int:
    return window.index + 1 or window.size


def _passed(noted: list[tuple[str, Unit, Any]], short: float) -> dict[str, Any]:
    """Return the last gradient norm, and this process's loss of each unit.

    short: what each micro-batch's loss was divided by, to the number of micro-batches.
    """
    losses: dict[str, float] = {}
    norms = {name: float(value) for name, _, value in noted if name == "grad_norm" and value is not None}
    for name, unit, value in noted:
        if name in ("loss", "whole") and value is not None:
            part = float(value) * (short if name == "loss" else 1)
            losses[unit.name] = losses.get(unit.name, 0.0) + part
    if len(losses) == 1:
        return {**norms, "loss": next(iter(losses.values()))}
    return {**norms, "losses": losses} if losses else norms

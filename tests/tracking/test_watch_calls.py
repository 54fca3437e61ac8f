"""The watch goes on, and the training with it, when a call of an observer raises."""

from __future__ import annotations

import io
import time
from contextlib import redirect_stderr

import pytest
from torch import nn

from accel_core import Accelerator
from accel_core.distributed import watch
from accel_testing.patience import patience

pytestmark = pytest.mark.needs("accel-ddp")


class Observer:
    def __init__(self, error=None):
        self.calls, self.error = 0, error

    def look(self, store):
        self.calls += 1
        if self.error is not None:
            raise self.error


def job():
    """Return how often each observer was called, one that raises between two, and what was said."""
    watch.LOOK_SECONDS = 0.1
    observers = Observer(), Observer(TypeError("no number")), Observer()
    with redirect_stderr(io.StringIO()) as log:
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(nn.Linear(2, 1))
        for observer in observers:
            watch.also(observer.look)
        until = time.monotonic() + patience(60)
        while observers[2].calls < 3 and time.monotonic() < until:
            time.sleep(0.1)
        accelerator.end_training()
    return [observer.calls for observer in observers], log.getvalue()


def test_a_call_that_raises_is_told_and_made_no_more(run_processes):
    for (first, broken, last), said in run_processes(job):
        assert (min(first, last) >= 3, broken) == (True, 1)
        (line,) = [line for line in said.splitlines() if "watch" in line]
        assert line.startswith("accel: the watch no longer calls <bound method Observer.look of ")
        assert line.endswith(", which raised TypeError('no number')")

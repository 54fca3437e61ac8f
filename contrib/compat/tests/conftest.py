"""In these tests `accelerate` is accel-compat's; Accelerate itself runs in processes of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from accel_compat import install, runs

install()


@pytest.fixture(autouse=True)
def no_run_is_left() -> Iterator[None]:
    """Each test starts without Accelerator and states, as a program does."""
    from accelerate.state import AcceleratorState, GradientState

    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    while (run := runs.newest()) is not None:
        run.end()

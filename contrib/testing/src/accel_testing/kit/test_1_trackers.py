"""Level 1: a tracker takes values, and is silent where it is not started."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from accel_core import Record
from accel_testing.kit import tasks_trackers as tasks
from accel_testing.kit.checks import concerns

pytestmark = concerns("tracker")

Run = Callable[..., list[Any]]


def test_a_tracker_that_is_not_started_touches_nothing(run: Run, tracker: Record, tmp_path: Path) -> None:
    run(tasks.not_started, str(tmp_path))
    assert list(tmp_path.iterdir()) == [], "every rank makes the tracker, the main process alone starts it"


def test_a_tracker_takes_any_config(run: Run, tracker: Record, tmp_path: Path) -> None:
    (kept,) = run(tasks.configured, str(tmp_path))
    assert kept, "the config was changed in place"


def test_a_tracker_takes_numbers_text_and_nested_values(run: Run, tracker: Record, tmp_path: Path) -> None:
    (given,) = run(tasks.logged, str(tmp_path))
    assert given, "get_tracker(..., unwrap=True) gives nothing to work with"


def test_a_tracker_goes_on_in_a_run_that_is_resumed(run: Run, tracker: Record, tmp_path: Path) -> None:
    run(tasks.resumed, str(tmp_path))

"""The proof: a run killed at a random step and resumed has the losses of one that was never killed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from digits_job import SAVE_EVERY, train

from accel_testing.processes import ProcessError

STEPS = 70  # one process: an epoch has 57 batches, two: 29


def run(
    run_processes, folder: Path, world: int, accumulate: int, kill_at: int | None = None
) -> list[dict[int, str]]:
    return run_processes(_train, str(folder), kill_at, accumulate, world=world, timeout=90)


def _train(folder: str, kill_at: int | None, accumulate: int) -> dict[int, str]:
    return train(folder, STEPS, kill_at=kill_at, accumulate=accumulate)


@pytest.mark.needs("accel-ddp")
@pytest.mark.parametrize(("world", "accumulate"), [(1, 1), (1, 4), (2, 1), (2, 2)])
@pytest.mark.by_default("2-1")
def test_digits_killed_and_resumed_is_bitwise_the_same(tmp_path, world, accumulate, run_processes):
    whole = run(run_processes, tmp_path / "whole", world, accumulate)
    kill_at = random.Random(f"{world} {accumulate}").randrange(2 * SAVE_EVERY * accumulate, STEPS)
    with pytest.raises(ProcessError):
        run(run_processes, tmp_path / "killed", world, accumulate, kill_at)
    resumed = run(run_processes, tmp_path / "killed", world, accumulate)
    for rank in range(world):
        start = min(resumed[rank])
        assert 0 < start <= kill_at, "it went on, instead of starting anew"
        assert {step: loss for step, loss in whole[rank].items() if step >= start} == resumed[rank], (
            f"rank {rank}, killed at {kill_at}"
        )

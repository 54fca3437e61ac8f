"""XLA's CPU device, for real: what the compiler makes of a run is what plain PyTorch makes of it."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import xla_jobs as jobs

pytestmark = pytest.mark.skipif(find_spec("torch_xla") is None, reason="needs torch_xla: tox -e xla-real")


def one(run_processes, function: Any, *args: Any) -> Any:
    (found,) = run_processes(function, *args, world=1, environment={"PJRT_DEVICE": "CPU"}, timeout=110)
    return found


def near(found: Any, expected: Any) -> None:
    assert [pair for each in found for pair in each] == pytest.approx(
        [pair for each in expected for pair in each], rel=1e-4, abs=1e-5
    )


def test_losses_and_norms_are_those_of_the_cpu(run_processes) -> None:
    near(one(run_processes, jobs.trained, jobs.XLA), one(run_processes, jobs.trained, jobs.NATIVE))


def test_a_graph_ends_before_each_batch_and_after_each_step(run_processes) -> None:
    found = one(run_processes, jobs.cuts, 1, 0)

    assert found[:8] == ["sync", "batch", "backward", "sync", "sync", "batch", "backward", "sync"]


def test_inside_a_window_it_ends_before_batches_only(run_processes) -> None:
    found = one(run_processes, jobs.cuts, 2, 0)

    assert found[:7] == ["sync", "batch", "backward", "sync", "batch", "backward", "sync"]


def test_threads_that_upload_batches_end_it_themselves_once_a_batch(run_processes) -> None:
    found = one(run_processes, jobs.cuts, 1, 1)

    assert found[:7] == ["sync", "batch", "backward", "sync", "sync", "batch", "backward"]


def test_tied_weights_stay_tied(run_processes) -> None:
    assert one(run_processes, jobs.tied) == (True, 4)


def test_structures_that_are_computed_again_in_backward_have_the_same_gradients(run_processes) -> None:
    kept, _ = one(run_processes, jobs.recomputed, False)
    again, said = one(run_processes, jobs.recomputed, True)

    assert again == kept
    assert "found a leaf of type object" in said


def test_what_a_dataset_raises_is_raised_where_one_iterates(run_processes) -> None:
    seen, said = one(run_processes, jobs.broken)

    assert seen == 4
    assert "sample 9 is damaged" in said


def test_an_epoch_may_be_left_early(run_processes) -> None:
    assert one(run_processes, jobs.left_early) == [[0.0, 1.0], [0.0, 1.0]]


def test_a_lost_tpu_is_no_slow_run_on_the_cpu(run_processes) -> None:
    assert "XLA's CPU device is used only if named (xla.pjrt_device: CPU" in one(
        run_processes, jobs.lost_device
    )


def test_the_cpu_device_is_used_when_named(run_processes) -> None:
    assert one(run_processes, jobs.named_device) == "CPU"


def test_processes_that_torch_xla_does_not_join_are_refused(run_processes) -> None:
    stack = {"device": "xla", "strategy": "xla-dp"}
    found = run_processes(jobs.refused, stack, world=2, environment={"PJRT_DEVICE": "CPU"}, timeout=110)

    assert all("2 processes were started, but torch_xla joins 1 of them" in each for each in found)

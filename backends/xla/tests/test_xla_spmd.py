"""SPMD, for real: one process, four virtual devices of XLA's CPU."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
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


def spmd_save(folder: str) -> Any:
    return jobs.save(jobs.SPMD, folder, plugins=jobs.spmd_config())


def spmd_resume(folder: str) -> Any:
    return jobs.resume(jobs.SPMD, folder, plugins=jobs.spmd_config())


def spmd_resume_both(folder: str) -> Any:
    return jobs.resume(jobs.SPMD, folder, plugins=jobs.spmd_config(dp_replicate=2))


@pytest.mark.parametrize("job", [jobs.spmd_trained, jobs.spmd_replicated, jobs.spmd_both])
def test_however_it_lies_on_the_devices_it_trains_like_one(job: Any, run_processes) -> None:
    near(one(run_processes, job), one(run_processes, jobs.trained, jobs.NATIVE))


def test_parameters_state_batches_and_outputs_are_in_parts(run_processes) -> None:
    found = one(run_processes, jobs.shardings)

    assert found["mesh"] == [("dp_replicate", 1), ("dp_shard", 4)]
    assert found["topology"] == (0, 1)
    assert found["batch"] == found["output"] == found["inner.weight"] == found["exp_avg"]
    assert found["inner.weight"] == "{devices=[4,1]0,1,2,3}"
    assert found["norm.bias"] == "{devices=[4]0,1,2,3}"


def test_each_part_is_saved_once(run_processes) -> None:
    found = one(run_processes, jobs.boxes, "")

    assert found["inner.weight"] == [((3, 0), (3, 6)), ((0, 0), (3, 6))]
    assert sorted(found["norm.weight"]) == [((0,), (3,)), ((3,), (3,))]


def test_a_run_goes_on_and_its_state_in_parts(tmp_path: Path, run_processes) -> None:
    expected = one(run_processes, spmd_save, str(tmp_path / "state"))
    found, where = one(run_processes, spmd_resume, str(tmp_path / "state"))

    near(found, expected)
    assert where == "{devices=[4,1]0,1,2,3}"


def test_a_native_process_goes_on_with_it(tmp_path: Path, run_processes) -> None:
    expected = one(run_processes, spmd_save, str(tmp_path / "state"))
    found, _ = one(run_processes, jobs.resume, jobs.NATIVE, str(tmp_path / "state"))

    near(found, expected)


def test_it_goes_on_with_what_a_native_process_saved_on_another_mesh(tmp_path: Path, run_processes) -> None:
    expected = one(run_processes, jobs.save, jobs.NATIVE, str(tmp_path / "state"))
    found, _ = one(run_processes, spmd_resume_both, str(tmp_path / "state"))

    near(found, expected)


def test_a_process_that_used_a_device_alone_is_refused(run_processes) -> None:
    assert "has already used an XLA device without SPMD" in one(run_processes, jobs.spmd_after_all)


def test_other_devices_are_refused(run_processes) -> None:
    assert "set device: xla" in one(run_processes, jobs.refused, {"device": "cpu", "strategy": "xla-spmd"})

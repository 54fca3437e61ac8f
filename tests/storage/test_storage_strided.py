"""A DTensor whose part is several boxes, such as packed projections of tensor parallelism."""

from __future__ import annotations

import pytest
import strided_job
import torch

from accel_core.storage import load


@pytest.mark.parametrize("name", strided_job.LAYOUTS)
def test_each_box_is_at_its_place_in_the_tensor(name, run_processes):
    found = run_processes(strided_job.boxes, name, world=2)
    assert all(all(right) for right, _ in found)
    assert sum(elements for _, elements in found) == strided_job.numbered().numel()


def test_packed_parts_are_read_in_one_process_and_in_another_layout(tmp_path, run_processes):
    run_processes(strided_job.saved, str(tmp_path / "saved"), "three in one", world=2)
    state = {"weight": torch.zeros(12, 8)}
    load(state, checkpoint_id=tmp_path / "saved")
    assert torch.equal(state["weight"], strided_job.numbered())
    assert run_processes(strided_job.loaded, str(tmp_path / "saved"), "packed columns", world=2) == [0.0, 0.0]

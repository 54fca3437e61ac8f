"""A model in stages on two processes gives what it gives in one."""

from __future__ import annotations

import pytest
import torch
from accelerate import prepare_pippy
from inference_job import Net, inputs, staged, with_a_cache, without_a_pipeline
from peers import needs_accelerate, said


@pytest.mark.parametrize(
    ("points", "gather", "rows", "chunks"),
    [("auto", False, 4, None), (["blocks.1"], True, 5, 3)],
    ids=["auto", "named, all ranks, uneven"],
)
@pytest.mark.needs("accel-fsdp")
def test_stages_give_what_one_process_gives(points, gather, rows, chunks, run_processes):
    (split, first), (_, last) = run_processes(staged, points, gather, rows, chunks, world=2)
    want = Net().eval()(**inputs(rows))["out"]

    assert split == (points if points != "auto" else split)
    assert len(split) == 1
    for out in last:
        torch.testing.assert_close(out, want)
    assert [out is not None for out in first] == [gather] * 2


@pytest.mark.needs("accel-fsdp")
def test_a_cache_is_left_out_of_the_output(run_processes):
    assert run_processes(with_a_cache, world=2) == [["out"]] * 2


def test_one_process_has_the_model_as_it_is():
    model = Net()
    assert prepare_pippy(model, example_args=(torch.ones(1, 4),)) is model
    torch.testing.assert_close(model(torch.ones(1, 4)), Net()(torch.ones(1, 4)))


def test_what_is_missing_is_named(run_processes):
    lacking = run_processes(without_a_pipeline, ["blocks.2"], world=2)
    too_many = run_processes(without_a_pipeline, ["blocks.1", "blocks.2"], world=2)

    assert all(said.startswith("PluginError: prepare_pippy needs accel-fsdp") for said in lacking)
    assert all("2 split points make 3 stages, and there are 2 processes" in said for said in too_many)


CODE = """
import json
from accelerate.inference import generate_device_map
from torch import nn
model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(4)))
maps = [generate_device_map(model, 2), generate_device_map(model, 3, ["Sequential"])]
print(json.dumps([list(found.items()) for found in maps]))
"""


@needs_accelerate
def test_maps_are_accelerates(run_processes):
    assert said(run_processes, CODE, ours=True) == said(run_processes, CODE, ours=False)

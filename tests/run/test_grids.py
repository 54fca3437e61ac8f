"""Each grid of ranks trains as one plain process: accumulation with a tail, clipping, tied weights."""

from __future__ import annotations

import json
from functools import cache

import grids_job
import pytest
import torch

from accel_testing.decoder import SPLIT

pytestmark = [pytest.mark.full, pytest.mark.needs("accel-ddp"), pytest.mark.timeout(900)]

GRIDS = {
    "ddp 2": (2, {"strategy": "ddp"}),
    "fsdp1 2": (2, {"version": 1}),
    "fsdp2 2": (2, {}),
    "hsdp 2x2": (4, {"dp_replicate": 2}),
    "tp 2": (2, {"dp_shard": 1, "tp": 2}),
    "pp 2": (2, {"dp_shard": 1, "pp": 2}),
    "cp 2": (2, {"cp": 2}),
    "tp x fsdp 4": (4, {"tp": 2}),
    "pp x tp x dp 8": (8, {"pp": 2, "tp": 2}),
    "cp x tp x dp 8": (8, {"cp": 2, "tp": 2}),
}

plain = cache(grids_job.plain)


def environment(sizes):
    """The grid as variables."""
    sizes = dict(sizes)
    found = {"ACCEL__STRATEGY": sizes.pop("strategy", "fsdp")}
    if "version" in sizes:
        found["ACCEL__FSDP__FSDP_VERSION"] = str(sizes.pop("version"))
    if "tp" in sizes:
        found["ACCEL__TENSOR_PARALLEL__PARALLELIZE_PLAN"] = json.dumps(SPLIT)
    if "cp" in sizes:
        found["ACCEL__CP__BUFFERS"] = json.dumps({"input_ids": 1, "targets": 1})
    return found | {f"ACCEL__PARALLELISM__{name.upper()}": str(size) for name, size in sizes.items()}


@pytest.mark.parametrize(("optimizer", "tied"), [("sgd", False), ("adamw", True)], ids=["SGD", "AdamW, tied"])
@pytest.mark.parametrize("grid", GRIDS)
def test_a_grid_has_the_weights_of_one_process(grid, optimizer, tied, run_processes):
    world, sizes = GRIDS[grid]
    given = optimizer, tied, "pp" in sizes
    found, *_ = run_processes(
        grids_job.trained, *given, world=world, environment=environment(sizes), timeout=200
    )
    for name, weight in plain(*given).items():
        torch.testing.assert_close(
            found[name], weight, rtol=1e-7, atol=1e-8, msg=lambda text, name=name: f"{name}: {text}"
        )

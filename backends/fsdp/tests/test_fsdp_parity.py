"""Losses, norms and weights of fifty steps on each grid are those of one process."""

from __future__ import annotations

import parity_job
import pytest
import torch

REPLICAS = {"dp_replicate": 2}
STAGES = {"pp": 2}
INTERLEAVED = {**STAGES, "pp_schedule": "Interleaved1F1B"}


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "options", "split", "world"),
    [
        *((kind, REPLICAS, False, 4) for kind in ("mlp", "conv", "gpt")),
        *((kind, {}, True, 2) for kind in ("mlp", "conv", "gpt")),
        *((kind, {}, True, 4) for kind in ("mlp", "conv", "gpt")),
        *((kind, STAGES, False, 2) for kind in ("mlp", "conv", "gpt")),
        *((kind, INTERLEAVED, False, 2) for kind in ("mlp", "gpt")),
        *((kind, STAGES, False, 4) for kind in ("mlp", "gpt")),
        ("gpt", {**STAGES, "dp_replicate": 2, "dp_shard": 1}, False, 4),
    ],
)
def test_fifty_steps_are_those_of_one_process(kind, options, split, world, run_processes):
    losses, norms, weights = parity_job.plain(kind)
    for found in run_processes(parity_job.trained, kind, options, split, world=world, timeout=120):
        assert found[0] == pytest.approx(losses, abs=1e-4)
        assert found[1] == pytest.approx(norms, rel=1e-3, abs=1e-4)
        assert {*found[2]} >= {*weights}
        for name, weight in weights.items():
            torch.testing.assert_close(found[2][name], weight, rtol=1e-3, atol=1e-4)

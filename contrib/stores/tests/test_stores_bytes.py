"""Bytes of a store: once to a node, none for a run that does not fit, and not those of two saves."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import held_job
import pytest
import stored_job as job
import torch
from s3_server import BUCKET, S3Server
from torch import nn

from accel_core import Accelerator, CheckpointError, Opened

URL = f"s3://{BUCKET}/run/ck"


def received(s3: S3Server) -> int:
    return sum(size for request in s3.seen if request.method == "GET" for size in request.answered)


def stored(s3: S3Server) -> int:
    return sum(len(s3.content(key)) for key in s3.names())


@pytest.mark.needs("accel-ddp")
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.by_default("2")
def test_large_tensors_beside_the_models_come_once_to_a_node(s3: S3Server, world: int, run_processes) -> None:
    run_processes(held_job.saved, URL, world=world)
    size = stored(s3)
    s3.seen.clear()
    found = run_processes(held_job.loaded, URL, world=world)
    assert found == [[3.0, 5.0, 10.0 + rank, 7.0] for rank in range(world)]
    assert received(s3) <= 1.01 * size


def deep() -> tuple[Accelerator, nn.Module, Any]:
    """Return a run whose checkpoint is JSON to a fifth: 600 small layers."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(600)])
    optimizer = torch.optim.AdamW(model.parameters())
    return accelerator, *accelerator.prepare(model, optimizer)


def saved_deep(url: str) -> None:
    accelerator, model, optimizer = deep()
    accelerator.backward(model(torch.ones(2, 16)).sum())
    optimizer.step()
    optimizer.zero_grad()
    accelerator.save_state(url)
    accelerator.end_training()


def loaded_deep(url: str) -> float:
    accelerator, model, _ = deep()
    accelerator.load_state(url)
    total = sum(float(each.detach().sum()) for each in model.parameters())
    accelerator.end_training()
    return total


@pytest.mark.needs("accel-ddp")
@pytest.mark.full
@pytest.mark.parametrize("world", [2, 3])
def test_the_files_that_each_rank_needs_come_once(s3: S3Server, world: int, run_processes) -> None:
    """Each rank once read all JSON files: 1.20 times the bytes at two ranks, 1.40 times at three."""
    run_processes(saved_deep, URL, world=world)
    size = stored(s3)
    s3.seen.clear()
    assert len({*run_processes(loaded_deep, URL, world=world)}) == 1
    assert received(s3) <= 1.01 * size
    asked = Counter(request.name for request in s3.seen)
    own = {name: asked.pop(name) for name in (BUCKET, "manifest-00000001.json")}
    claims = [asked.pop(name) for name in [*asked] if name.startswith("claim-")]
    assert {*asked.values()} == {1}
    assert len(asked) == 2 * world + 1, "two files of each rank, and the state"
    assert len(claims) == 1
    assert own["manifest-00000001.json"] <= world + 1
    assert own[BUCKET] <= 6 + 2 * world


NUMBERS = """
from accel_core import Card, hooks, implements

class Plugin:
    def __init__(self, config, run):
        pass

    @implements(hooks.prepare_unit)
    def prepare_unit(self, unit, loaders):
        unit.wrapped += unit.models

    @implements(hooks.refuse_optimizer_state)
    def refuse_optimizer_state(self, unit, optimizer, template, plain):
        steps = [named["step"].number() for named in template.values()]
        return [] if steps == [2.0, 2.0] else [f"steps are {steps}"]

CARD = Card(name="numbers", slot="strategy", summary="A toy.", api_version="1.0", implementation="toy:Plugin")
"""
"""A plugin that reads step numbers to compare, as those of DeepSpeed and megatron-core do."""


@pytest.mark.full
def test_step_numbers_that_a_strategy_compares_come_once_to_a_node(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_processes
) -> None:
    """Each rank read their blocks for itself."""
    (tmp_path / "toy.py").write_text(NUMBERS)
    (info := tmp_path / "toy-1.0.dist-info").mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: toy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[accel_core.strategy]\nnumbers = toy:CARD\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("ACCEL__STRATEGY", "numbers")
    run_processes(job.saved, URL, 2, 8192, world=2)
    s3.seen.clear()
    run_processes(job.loaded, URL, 8192, world=2)
    data = [each.name for each in s3.seen if "safetensors" in each.name]
    assert sum(size for each in s3.seen if each.name in data for size in each.answered) <= sum(
        len(s3.content(key)) for key in s3.names() if key.endswith(".safetensors")
    )


def refused(url: str, width: int) -> str:
    accelerator, model, *_ = held_job.made(width)
    before = job.weight(accelerator, model)
    with pytest.raises(CheckpointError) as caught:
        accelerator.load_state(url)
    assert torch.equal(job.weight(accelerator, model), before)
    accelerator.end_training()
    return str(caught.value)


@pytest.mark.needs("accel-ddp")
@pytest.mark.full
@pytest.mark.parametrize("world", [1, 2])
def test_a_run_that_does_not_fit_asks_for_no_weights_and_no_registered_object(
    s3: S3Server, world: int, run_processes
) -> None:
    held_job.saved(URL, held_job.WIDTH)
    s3.seen.clear()
    said = [refused(URL, 64)] if world == 1 else run_processes(refused, URL, 64, world=world)
    for text in said:
        assert f"weight has shape [512, {held_job.WIDTH}] in the checkpoint, [512, 64] here" in text
    held_and_compared = 2 * 4 * held_job.SIZE  # the loader's state, and what lies in the optimizer's
    assert received(s3) < held_and_compared + (9 << 20)


def test_one_of_a_series_that_does_not_fit_is_not_passed_over_for_an_older(s3: S3Server) -> None:
    """A load that took it would go on from another place than the newest, in silence."""
    url = f"s3://{BUCKET}/run"
    for width in (32, 64):
        accelerator, *_ = job.made(width, project_config=job.project(url))
        accelerator.save_state()
        accelerator.end_training()
    accelerator, *_ = job.made(32, project_config=job.project(url))
    s3.seen.clear()
    with pytest.raises(CheckpointError, match="checkpoint_1 does not fit this run"):
        accelerator.load_state()
    assert not [request for request in s3.seen if request.name.endswith(".safetensors")]
    accelerator.end_training()


@pytest.mark.full
def test_a_checkpoint_that_is_replaced_while_it_is_read_stays_until_it_is_read(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = job.saved(URL, 1)
    accelerator, model, _ = job.made()
    writer, *_ = job.made()
    verify = Opened.verify

    def replaced(self: Opened, blocks: Any) -> None:
        monkeypatch.setattr(Opened, "verify", verify)
        writer.save_state(URL)
        assert len({key.split("/")[2] for key in s3.names() if key.count("/") == 3}) == 2
        verify(self, blocks)

    monkeypatch.setattr(Opened, "verify", replaced)
    accelerator.load_state(URL)
    assert torch.equal(job.weight(accelerator, model), old)
    writer.save_state(URL)
    assert len({key.split("/")[2] for key in s3.names() if key.count("/") == 3}) == 1
    for each in (accelerator, writer):
        each.end_training()

"""Delayed scaling in pipeline stages: each has scales of its own, which its replicas share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from te_problem import TIMEOUT, Block
from torch import nn
from torch.nn.functional import cross_entropy

from accel_core import Accelerator, ParallelismConfig
from accel_transformer_engine import TransformerEngineConfig

STEPS = 2
Found = tuple[list[float], dict[str, torch.Tensor]]


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(16, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(32, 16, bias=False)

    def forward(self, ids):
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(net: Any, ids: torch.Tensor) -> tuple[torch.Tensor, None]:
    return cross_entropy(net(ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten()), None


def window(run: Accelerator, step: int) -> list[torch.Tensor]:
    """This reader's part of each of four micro-batches."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(16, (4, 8, 5), generator=generator)
    return list(ids[:, run.run.topology.reader :: run.run.topology.readers])


def goes_on(stages: int, source: Path | None, target: Path | None, steps: list[int]) -> Found:
    """Losses, and the largest maximum in the history of each layer's input on this rank."""
    config = TransformerEngineConfig(recipe="delayed", amax_history_len=16)
    plugins = [TIMEOUT, config]
    if stages > 1:
        plugins.append(ParallelismConfig(pp=stages))
    strategy = "fsdp" if stages > 1 else None
    run = Accelerator(device="cpu", strategy=strategy, mixed_precision="fp8-te", plugins=plugins)
    net = Deep()
    net, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    if source is not None:
        run.load_state(source)
    losses = []
    for step in steps:
        found = run.forward_backward(net, window(run, step), loss_of, microbatches=4)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(run.reduce(found.loss, "mean").item())
    if target is not None:
        run.save_state(target)
    seen = {
        run.run.units[0].qualify(0, name): layer.fp8_meta["scaling_fwd"].amax_history[:, 0].max().clone()
        for name, layer in net.named_modules()
        if "scaling_fwd" in (getattr(layer, "fp8_meta", None) or {})
    }
    run.end_training()
    return losses, seen


@pytest.fixture(scope="module")
def whole(run_processes) -> Found:
    return run_processes(goes_on, 1, None, None, [0, 1], world=1)[0]


@pytest.mark.needs("accel-fsdp")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("world", [2, 4])
def test_each_stage_sees_the_maxima_that_one_process_sees(whole: Found, world: int, run_processes) -> None:
    found = run_processes(goes_on, 2, None, None, [0, 1], world=world, timeout=200)
    seen: dict[str, torch.Tensor] = {}
    for losses, of_rank in found:
        assert losses == pytest.approx(whole[0], rel=5e-3)
        assert 0 < len(of_rank) < len(whole[1])
        assert all(torch.equal(of_rank[name], seen.setdefault(name, of_rank[name])) for name in of_rank)
    assert seen.keys() == whole[1].keys()
    for name, maximum in whole[1].items():
        torch.testing.assert_close(seen[name], maximum, rtol=0.05, atol=0)


@pytest.mark.needs("accel-fsdp")
@pytest.mark.timeout(300)
def test_scales_of_all_stages_are_saved_and_loaded_by_any_number(tmp_path: Path, run_processes) -> None:
    run_processes(goes_on, 2, None, tmp_path / "a", [0, 1], world=2, timeout=200)
    expected = run_processes(goes_on, 2, tmp_path / "a", tmp_path / "b", [2, 3], world=2, timeout=200)
    again = run_processes(goes_on, 2, tmp_path / "a", None, [2, 3], world=2, timeout=200)
    assert again == expected
    ((losses, seen),) = run_processes(goes_on, 1, tmp_path / "a", None, [2, 3], world=1, timeout=200)
    assert losses == pytest.approx(expected[0][0], rel=5e-3)
    assert seen.keys() == expected[0][1].keys() | expected[1][1].keys()

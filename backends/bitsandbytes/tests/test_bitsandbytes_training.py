"""Adapters train on quantised models as by hand, and bitsandbytes' optimizers resume bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import peft
import pytest
import torch
from quantised_problem import KINDS, QUANTISED, TIMEOUT, Model, config, ids, model
from torch import nn

from accel_bitsandbytes import BitsAndBytesPlugin, load_and_quantize_model
from accel_core import Accelerator, ConfigError


def adapted(kind: str) -> Any:
    """A quantised model with LoRA, whose weights alone train."""
    net = load_and_quantize_model(model(), config(kind)).requires_grad_(False)
    torch.manual_seed(1)
    return peft.get_peft_model(
        net, peft.LoraConfig(r=4, target_modules=["up", "down"], init_lora_weights=False)
    )


def trained(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.detach().clone() for name, each in net.named_parameters() if each.requires_grad}


def batches() -> Iterator[torch.Tensor]:
    yield from (ids(seed, rows=4) for seed in range(3))


def by_hand(kind: str) -> dict[str, torch.Tensor]:
    net = adapted(kind)
    optimizer = torch.optim.AdamW([each for each in net.parameters() if each.requires_grad], lr=0.01)
    for batch in batches():
        net(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return trained(net)


def in_a_run(kind: str, folder: Path | None) -> dict[str, torch.Tensor]:
    run = Accelerator(device="cpu", plugins=[TIMEOUT, BitsAndBytesPlugin()])
    net = adapted(kind)
    optimizer = torch.optim.AdamW([each for each in net.parameters() if each.requires_grad], lr=0.01)
    net, optimizer = run.prepare(net, optimizer)
    size, rank = run.num_processes, run.process_index
    for batch in batches():
        run.backward(net(batch[rank * 4 // size : (rank + 1) * 4 // size]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    found = trained(run.unwrap_model(net))
    if folder is not None:
        run.save_state(folder)
        before = net(ids()).detach()
        run.load_state(folder)
        assert torch.equal(net(ids()), before)
    run.end_training()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_lora_trains_as_by_hand(tmp_path: Path, kind: str) -> None:
    expected, found = by_hand(kind), in_a_run(kind, tmp_path / "state")
    start = trained(adapted(kind))
    assert len(found) == 12
    assert [name for name in found if torch.equal(found[name], start[name])] == []
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


@pytest.mark.needs("accel-ddp")
@pytest.mark.parametrize("kind", ["int8", "nf4, double"])
def test_lora_trains_in_two_processes_as_in_one(tmp_path: Path, kind: str, run_processes) -> None:
    expected = by_hand(kind)
    first, second = run_processes(in_a_run, kind, tmp_path / "state", world=2)
    for name, tensor in expected.items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], tensor, rtol=1e-4, atol=1e-5)


def continued(kind: str, folder: Path, first: int) -> dict[str, torch.Tensor]:
    """One step more: from the checkpoint of the step before, into another one."""
    run = Accelerator(device="cpu", plugins=[TIMEOUT, BitsAndBytesPlugin()])
    net = adapted(kind)
    optimizer = torch.optim.AdamW([each for each in net.parameters() if each.requires_grad], lr=0.01)
    net, optimizer = run.prepare(net, optimizer)
    if first:
        run.load_state(folder / str(first))
    size, rank = run.num_processes, run.process_index
    batch = list(batches())[first]
    run.backward(net(batch[rank * 4 // size : (rank + 1) * 4 // size]).square().mean())
    optimizer.step()
    run.save_state(folder / str(first + 1))
    found = trained(run.unwrap_model(net))
    run.end_training()
    return found


@pytest.mark.needs("accel-ddp")
@pytest.mark.parametrize("kind", ["int8", "nf4, double"])
def test_adapters_go_on_in_two_processes_and_again_in_one(tmp_path: Path, kind: str, run_processes) -> None:
    for first, world in enumerate((1, 2, 1)):
        found, *_ = run_processes(continued, kind, tmp_path, first, world=world)
    for name, tensor in by_hand(kind).items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)


def test_an_optimizer_over_quantised_weights_is_refused_by_name() -> None:
    run = Accelerator(device="cpu", plugins=[BitsAndBytesPlugin()])
    net = load_and_quantize_model(model(), config("nf4"))
    with pytest.raises(ConfigError, match=r"an optimizer has blocks\.0\.up\.weight .* and 5 more") as raised:
        run.prepare(net, torch.optim.AdamW(net.parameters()))
    assert str(raised.value).endswith("[p for p in model.parameters() if p.requires_grad]")
    run.end_training()


def test_the_run_explains_what_is_quantised() -> None:
    run = Accelerator(device="cpu", plugins=[BitsAndBytesPlugin()])
    run.prepare(adapted("nf4"))
    told = str(run.explain())
    assert f"nf4 by bitsandbytes: {', '.join(QUANTISED)}" in told
    assert "not quantised: head: the last module" in told
    run.end_training()


@pytest.mark.filterwarnings("ignore:Merge lora module")
def test_a_merged_adapter_is_what_checkpoints_hold(tmp_path: Path) -> None:
    merged = adapted("nf4").merge_and_unload()
    run = Accelerator(device="cpu")
    net = run.prepare(merged)
    expected = net(ids()).detach()
    run.save_state(tmp_path / "state")
    run.end_training()
    run = Accelerator(device="cpu")
    net = run.prepare(load_and_quantize_model(model(7), config("nf4")))
    run.load_state(tmp_path / "state")
    assert torch.equal(net(ids()), expected)
    run.end_training()


OPTIMIZERS = ["AdamW8bit", "PagedAdamW8bit", "PagedAdamW", "AdamW", "Lion8bit", "SGD8bit", "AdEMAMix8bit"]


def made(name: str) -> tuple[Accelerator, Any, Any]:
    run = Accelerator(device="cpu", plugins=[TIMEOUT])
    net = Model()
    more = {"momentum": 0.9} if name == "SGD8bit" else {}
    net, optimizer = run.prepare(net, getattr(bnb.optim, name)(net.parameters(), lr=1e-3, **more))
    return run, net, optimizer


def steps(run: Accelerator, net: Any, optimizer: Any, seeds: range) -> None:
    for seed in seeds:
        run.backward(net(ids(seed)).square().mean())
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore::UserWarning")  # paged optimizers say that the CPU has no pages
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_of_bitsandbytes_resume_bit_for_bit(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    run, net, optimizer = made(name)
    steps(run, net, optimizer, range(3))
    run.save_state(tmp_path / "state")
    steps(run, net, optimizer, range(3, 6))
    expected = {key: each.clone() for key, each in net.state_dict().items()}
    state = optimizer.optimizer.state[net.head.weight]
    if name.endswith("8bit"):
        assert state["state1"].dtype is torch.uint8
    run.end_training()
    torch.manual_seed(9)
    run, net, optimizer = made(name)
    run.load_state(tmp_path / "state")
    steps(run, net, optimizer, range(3, 6))
    found = net.state_dict()
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []
    run.end_training()

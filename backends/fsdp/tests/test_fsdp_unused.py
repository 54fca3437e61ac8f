"""Ranks use different parameters, or none use some: steps are those of one process, or are refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from fsdp_problem import TIMEOUT, accelerator, distance, net, plugin
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from accel_core import Accelerator, AccelError
from accel_fsdp import FullyShardedDataParallelPlugin

Used = Sequence[Sequence[int]]
"""Of each step: which heads rank 0 uses, and which rank 1."""
CASES: dict[str, list[list[list[int]]]] = {
    "by rank": [[[0], [1]], [[1], [0]], [[0], [1]]],
    "the same": [[[0], [0]], [[0], [0]], [[0], [0]]],
    "alternating": [[[0], [0]], [[1], [1]], [[2], [2]]],
    "one rank all": [[[0, 1, 2], [1]], [[0], [0, 1, 2]], [[2], [2]]],
}

FINDS = {"find_unused_parameters": True}
needs_zeros = pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="torch has it since 2.13"
)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(6, 4)
        self.heads = nn.ModuleList(nn.Linear(4, 3) for _ in range(3))

    def forward(self, x: Tensor, used: Sequence[int]) -> Tensor:
        hidden = torch.tanh(self.body(x))
        return torch.stack([self.heads[each](hidden).square().mean() for each in used]).sum()


class Mixture(nn.Module):
    """Experts in a list, of which a rank calls those that its tokens choose."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.gate = nn.Linear(6, 4)
        self.experts = nn.ModuleList(nn.Linear(6, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        out = x.new_zeros(len(x), 4)
        for number, expert in enumerate(self.experts):
            mine = (chosen == number).nonzero()[:, 0]
            if len(mine):
                out = out.index_add(0, mine, expert(x[mine]) * weights[mine, None])
        return out.square().mean()


def started(net: nn.Module, optimizer: str, sharded: bool, **options: Any) -> tuple[Accelerator, Any, Any]:
    plugins = [TIMEOUT, FullyShardedDataParallelPlugin(**options)] if sharded else []
    run = Accelerator(device="cpu", strategy="fsdp" if sharded else "single", plugins=plugins)
    made = getattr(torch.optim, optimizer)(net.parameters(), lr=0.1)
    return (run, *run.prepare(net, made))


def data(step: int) -> Tensor:
    return torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(step))


def of_heads(used: Used, optimizer: str, sharded: bool, options: dict[str, Any]) -> dict[str, Tensor]:
    run, model, stepper = started(Heads(), optimizer, sharded, **options)
    for step, ranks in enumerate(used):
        x = data(step)
        mine = [run.process_index] if sharded else [0, 1]
        run.backward(torch.stack([model(x[rank], ranks[rank]) for rank in mine]).mean())
        stepper.step()
        stepper.zero_grad()
    found = {name: tensor.clone() for name, tensor in run.get_state_dict(model, rank0_only=False).items()}
    run.end_training()
    return found


@needs_zeros
@pytest.mark.parametrize("case", CASES)
@pytest.mark.by_default("by rank")
def test_each_parameter_gets_the_gradient_of_all_ranks(case: str, run_processes) -> None:
    expected = of_heads(CASES[case], "SGD", False, {})
    for found in run_processes(of_heads, CASES[case], "SGD", True, {}):
        torch.testing.assert_close(found, expected)


def mixed(sharded: bool) -> dict[str, Tensor]:
    run, model, stepper = started(Mixture(), "SGD", sharded, **FINDS)
    for step in range(4):
        x = data(step)
        mine = [run.process_index] if sharded else [0, 1]
        run.backward(torch.stack([model(x[rank]) for rank in mine]).mean())
        stepper.step()
        stepper.zero_grad()
    found = {name: tensor.clone() for name, tensor in run.get_state_dict(model, rank0_only=False).items()}
    run.end_training()
    return found


@needs_zeros
@pytest.mark.full
def test_experts_in_a_list_train_though_a_rank_has_no_token_for_some(run_processes) -> None:
    for found in run_processes(mixed, True):
        torch.testing.assert_close(found, mixed(False))


def accumulated(precision: str, finds: bool) -> tuple[list[str], float]:
    """A window whose micro-batches use different heads; which have a gradient at its end."""
    run = Accelerator(
        device="cpu",
        strategy="fsdp",
        plugins=[TIMEOUT, FullyShardedDataParallelPlugin(find_unused_parameters=finds)],
        gradient_accumulation_steps=2,
        mixed_precision=precision,
    )
    model, _ = run.prepare(given := Heads(), torch.optim.SGD(given.parameters(), lr=0.1))
    x = data(0)[0]
    for used in ([0, 1], [0]):
        with run.accumulate(model):
            run.backward(model(x, used))
    names = [name for name, p in model.named_parameters() if p.grad is not None and "weight" in name]
    total = model.heads[1].weight.grad.full_tensor().sum().item()
    run.end_training()
    return names, total


@pytest.mark.full
@pytest.mark.parametrize("finds", [False, pytest.param(True, marks=needs_zeros)])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_what_an_earlier_micro_batch_used_counts(precision: str, finds: bool, run_processes) -> None:
    net, x = Heads(), data(0)[0]
    (net(x, [0, 1]) / 2).backward()
    expected = net.heads[1].weight.grad.sum().item()
    for names, total in run_processes(accumulated, precision, finds):
        assert (
            names
            == ["body.weight", "heads.0.weight", "heads.1.weight", "heads.2.weight"][
                : 3 + (finds or precision == "no")
            ]
        )
        assert total == pytest.approx(expected, rel=1e-5 if precision == "no" else 0.1)


def refused(used: Used) -> str:
    policy = {"param_dtype": "bf16", "reduce_dtype": "float32"}
    run, model, stepper = started(Heads(), "SGD", True, mixed_precision_policy=policy)
    for step, ranks in enumerate(used):
        run.backward(model(data(step)[run.process_index], ranks[run.process_index]))
        if step < len(used) - 1:
            stepper.step()
            stepper.zero_grad()
    with pytest.raises(AccelError) as caught:
        stepper.step()
    run.end_training()
    return str(caught.value)


@pytest.mark.full
@pytest.mark.parametrize("used", [[[[0, 1], [0, 2]]], [[[0, 1, 2], [0, 1, 2]], [[0, 2], [0, 2]]]])
def test_a_parameter_that_is_left_out_on_some_ranks_or_later_is_named(used: Used, run_processes) -> None:
    for said in run_processes(refused, used):
        assert "heads.1.weight, heads.1.bias" in said
        assert said.splitlines()[-1] == "set fsdp.find_unused_parameters: true"


class Stage(nn.Module):
    """Three experts, of which `used` are called."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.used: Sequence[int] = range(3)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.stack([self.experts[each](x) for each in self.used]).sum(0)


class Stages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.one, self.other = nn.Linear(6, 6), Stage(), Stage()

    def forward(self, x: Tensor) -> Tensor:
        return self.other(torch.tanh(self.one(self.first(x))))


def in_a_pipeline(used: list[list[list[int]]] | None, pipeline: bool) -> dict[str, Tensor]:
    """Steps of two, two and one micro-batch on each of two readers. used: of each reader and micro-batch.

    For another number of micro-batches torch learns the shapes anew, by a backward of its own.
    """
    net = Stages().double()
    stages = FullyShardedDataParallelPlugin(
        pp_size=2, pp_split_points=["other"], find_unused_parameters=used is not None
    )
    plugins = [TIMEOUT, stages] if pipeline else []
    run = Accelerator(device="cpu", strategy="fsdp" if pipeline else "single", plugins=plugins)
    model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))

    def loss(model: Any, batch: tuple[int, int, Tensor]) -> tuple[Tensor, None]:
        reader, number, x = batch
        for stage in (net.one, net.other):
            stage.used = used[reader][number] if used else range(3)
        return model(x).square().mean(), None

    for step, count in enumerate((2, 2, 1)):
        x = torch.randn(2, 2, 5, 6, generator=torch.Generator().manual_seed(step)).double()
        batches = [[(reader, number, x[reader, number]) for number in range(count)] for reader in range(2)]
        if pipeline:
            run.forward_backward(model, iter(batches[run.run.topology.reader]), loss, microbatches=count)
        else:
            for batch in batches[0] + batches[1]:
                (loss(model, batch)[0] / (2 * count)).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = {name: tensor.clone() for name, tensor in run.get_state_dict(model, rank0_only=False).items()}
    run.end_training()
    return found


@pytest.mark.full
@pytest.mark.parametrize(
    "used",
    [[[[0], [0]], [[1], [1]]], [[[0], [2, 0]], [[1], [0]]], None],
    ids=["reader", "micro-batch", "all"],
)
def test_ranks_that_share_a_stage_of_a_pipeline_use_different_parameters(
    used: list[list[list[int]]] | None, run_processes
) -> None:
    wanted = in_a_pipeline(used, pipeline=False)
    for found in run_processes(in_a_pipeline, used, True, world=4):
        for name, tensor in wanted.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-14, msg=name)


def two_forwards_in_one_backward(before: int) -> float:
    """How far gradients are from those of one process, after `before` ordinary steps."""
    run = accelerator(plugin("mlp", 2))
    model, alone = net("mlp"), net("mlp")
    optimizer, plain = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, alone))
    model, optimizer = run.prepare(model, optimizer)
    inputs = torch.linspace(-1, 1, 24).reshape(4, 6)
    for step in range(before + 1):
        for each, stepper in ((model, optimizer), (alone, plain)):
            stepper.zero_grad()
            loss = each(inputs).square().mean()
            if step == before:
                loss = loss + each(inputs + 1).square().mean()
            loss.backward()
            stepper.step()
    state = run.get_state_dict(model, rank0_only=False)
    run.end_training()
    return distance(dict(state), dict(alone.state_dict()))


@pytest.mark.full
@pytest.mark.parametrize("before", [0, 1])
def test_two_forwards_in_one_backward_train_as_one_process_does(before: int, run_processes) -> None:
    for apart in run_processes(two_forwards_in_one_backward, before):
        assert apart < 1e-5

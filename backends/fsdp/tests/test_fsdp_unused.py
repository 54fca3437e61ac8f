"""Ranks use different parameters, or none use some: steps are those of one process, or are refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_problem import TIMEOUT, accelerator, distance, net, plugin, sized
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from accel_core import Accelerator, AccelError, ConfigError
from accel_fsdp import FullyShardedDataParallelPlugin
from accel_fsdp.sharding.accumulated import sharded_parameters

Used = Sequence[Sequence[int]]
"""Of each step: which heads rank 0 uses, and which rank 1."""
CASES: dict[str, list[list[list[int]]]] = {
    "by rank": [[[0], [1]], [[1], [0]], [[0], [1]]],
    "the same": [[[0], [0]], [[0], [0]], [[0], [0]]],
    "by turns": [[[0], [0]], [[1], [1]], [[0], [0]]],
    "by rank later": [[[0], [0]], [[0], [1]], [[1], [0]]],
    "one rank all": [[[0, 1, 2], [1]], [[0], [0, 1, 2]], [[2], [2]]],
}
DECAYS = {"lr": 0.1, "weight_decay": 0.5}
"""Options of AdamW and SGD, which move parameters whose gradient is zero."""

FINDS = {"find_unused_parameters": True}
needs_zeros = pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="torch has it since 2.13"
)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(6, 4)
        self.heads = nn.ModuleList(nn.Linear(4, width) for width in (3, 4, 3))

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
    plugins = [TIMEOUT, *sized(**options)] if sharded else []
    run = Accelerator(device="cpu", strategy="fsdp" if sharded else "single", plugins=plugins)
    return (run, *run.prepare(net, getattr(torch.optim, optimizer)(net.parameters(), **DECAYS)))


def data(step: int) -> Tensor:
    return torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(step))


def of_heads(used: Used, sharded: bool, options: dict[str, Any]) -> dict[str, Tensor]:
    run, model, stepper = started(Heads(), "AdamW", sharded, **options)
    for step, ranks in enumerate(used):
        x = data(step)
        mine = [run.process_index] if sharded else [0, 1]
        run.backward(torch.stack([model(x[rank], ranks[rank]) for rank in mine]).mean())
        if sharded:
            run.clip_grad_norm_(model.parameters(), 0.5)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        stepper.step()
        stepper.zero_grad()
    return weights(run, model)


def weights(run: Accelerator, model: nn.Module) -> dict[str, Tensor]:
    found = {name: tensor.clone() for name, tensor in run.get_state_dict(model, rank0_only=False).items()}
    run.end_training()
    return found


@needs_zeros
@pytest.mark.parametrize("case", CASES)
@pytest.mark.by_default("by rank", "by turns", "by rank later")
def test_ranks_that_use_different_parameters_train_as_one_process_does(case: str, run_processes) -> None:
    expected = of_heads(CASES[case], False, {})
    for found in run_processes(of_heads, CASES[case], True, FINDS):
        torch.testing.assert_close(found, expected)


@needs_zeros
@pytest.mark.full
def test_replicas_of_shards_that_use_different_parameters_train_as_one_process_does(run_processes) -> None:
    used = [[*step, *step] for step in CASES["by rank later"]]
    expected = of_heads(CASES["by rank later"], False, {})
    options = {**FINDS, "dp_replicate": 2}
    for found in run_processes(of_four, used, options, world=4):
        torch.testing.assert_close(found, expected)


def of_four(used: Used, options: dict[str, Any]) -> dict[str, Tensor]:
    run, model, stepper = started(Heads(), "AdamW", True, **options)
    for step, ranks in enumerate(used):
        rank = run.process_index
        run.backward(model(data(step)[rank % 2], ranks[rank]))
        run.clip_grad_norm_(model.parameters(), 0.5)
        stepper.step()
        stepper.zero_grad()
    return weights(run, model)


def never_called(sharded: bool, precision: str, finds: bool) -> dict[str, Tensor]:
    plugins = [TIMEOUT, FullyShardedDataParallelPlugin(find_unused_parameters=finds)] if sharded else []
    run = Accelerator(
        device="cpu",
        strategy="fsdp" if sharded else "single",
        plugins=plugins,
        mixed_precision=precision,
        gradient_accumulation_steps=2,
    )
    net = Heads()
    model, stepper = run.prepare(net, torch.optim.AdamW(net.parameters(), **DECAYS))
    for step in range(6):
        with run.accumulate(model):
            x = data(step)
            x = x[run.process_index] if sharded else x.flatten(0, 1)
            run.backward(model(x, [0]))
            stepper.step()
            stepper.zero_grad()
    return weights(run, model)


@pytest.mark.parametrize("finds", [False, pytest.param(True, marks=needs_zeros)])
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.by_default("no-False", "bf16-False", "no-True")
def test_a_layer_that_no_rank_calls_stays_as_it_is(precision: str, finds: bool, run_processes) -> None:
    begun, expected = Heads().state_dict(), never_called(False, precision, False)
    for found in run_processes(never_called, True, precision, finds):
        for name, tensor in found.items():
            if name.startswith(("heads.1", "heads.2")):
                assert torch.equal(tensor, begun[name]), name
            else:
                tolerance = 1e-6 if precision == "no" else 1e-2
                torch.testing.assert_close(tensor, expected[name], rtol=tolerance, atol=tolerance)


def mixed(sharded: bool) -> dict[str, Tensor]:
    run, model, stepper = started(Mixture(), "AdamW", sharded, **(FINDS if sharded else {}))
    for step in range(4):
        x = data(step)
        mine = [run.process_index] if sharded else [0, 1]
        run.backward(torch.stack([model(x[rank]) for rank in mine]).mean())
        stepper.step()
        stepper.zero_grad()
    return weights(run, model)


@needs_zeros
@pytest.mark.full
def test_experts_in_a_list_train_though_a_rank_has_no_token_for_some(run_processes) -> None:
    for found in run_processes(mixed, True):
        torch.testing.assert_close(found, mixed(False))


def accumulated(
    used: Sequence[Sequence[int]], sharded: bool, precision: str, finds: bool
) -> dict[str, Tensor]:
    """Two windows of two micro-batches, which use different heads."""
    plugins = [TIMEOUT, FullyShardedDataParallelPlugin(find_unused_parameters=finds)] if sharded else []
    run = Accelerator(
        device="cpu",
        strategy="fsdp" if sharded else "single",
        plugins=plugins,
        gradient_accumulation_steps=2,
        mixed_precision=precision,
    )
    net = Heads()
    model, stepper = run.prepare(net, torch.optim.SGD(net.parameters(), **DECAYS))
    for step in range(4):
        x = data(step)
        with run.accumulate(model):
            run.backward(model(x[run.process_index] if sharded else x.flatten(0, 1), used[step % 2]))
            stepper.step()
            stepper.zero_grad()
    return weights(run, model)


FIRST, LAST = [[0, 1], [0]], [[0], [0, 1]]


@pytest.mark.parametrize(
    ("used", "precision", "finds"),
    [
        pytest.param(FIRST, "no", False, id="first"),
        pytest.param(LAST, "no", False, id="last"),
        pytest.param(FIRST, "bf16", False, id="first-bf16"),  # the last alone is an error of torch's
        pytest.param(FIRST, "no", True, marks=needs_zeros, id="first-finds"),
        pytest.param(LAST, "no", True, marks=needs_zeros, id="last-finds"),
        pytest.param(LAST, "bf16", True, marks=needs_zeros, id="last-bf16-finds"),
    ],
)
@pytest.mark.by_default("first", "last-bf16-finds")
def test_a_parameter_of_one_micro_batch_of_a_window_is_used(
    used: list[list[int]], precision: str, finds: bool, run_processes
) -> None:
    expected = accumulated(used, False, precision, False)
    tolerance = 1e-5 if precision == "no" else 2e-2
    for found in run_processes(accumulated, used, True, precision, finds):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def refused(used: Used, options: dict[str, Any]) -> list[str]:
    """Say per step which error it was, until there is one."""
    run, model, stepper = started(Heads(), "SGD", True, **options)
    said = []
    for step, ranks in enumerate(used):
        run.backward(model(data(step)[run.process_index], ranks[run.process_index]))
        try:
            stepper.step()
        except AccelError as error:
            said.append(str(error))
            break
        said.append("")
        stepper.zero_grad()
    run.end_training()
    return said


MIXED = {"mixed_precision_policy": {"param_dtype": "bf16", "reduce_dtype": "float32"}}


@pytest.mark.parametrize("options", [pytest.param({}, marks=needs_zeros), MIXED], ids=["no", "mixed"])
@pytest.mark.parametrize("case", ["by rank", "one rank all"])
@pytest.mark.by_default("by rank-no", "one rank all-no", "one rank all-mixed")
def test_ranks_that_differ_in_the_first_step_are_refused(
    case: str, options: dict[str, Any], run_processes
) -> None:
    for (said,) in run_processes(refused, CASES[case], options):
        assert "heads.0.weight, heads.0.bias" in said
        assert said.splitlines()[-1] == "set fsdp.find_unused_parameters: true"


@pytest.mark.parametrize("options", [{}, MIXED], ids=["no", "mixed"])
@pytest.mark.parametrize("left_out", [1, 2])
@pytest.mark.by_default("1-no", "2-mixed")
def test_a_step_that_uses_other_parameters_than_the_first_is_refused(
    left_out: int, options: dict[str, Any], run_processes
) -> None:
    first, other = [0, 1, 2], [each for each in range(3) if each != left_out]
    for used in ([first, first, other], [other, first]):
        for *passed, said in run_processes(refused, [[each, each] for each in used], options):
            assert passed == [""] * (len(used) - 1)
            assert f"heads.{left_out}.weight, heads.{left_out}.bias got a gradient" in said


@pytest.mark.parametrize("options", [{}, MIXED], ids=["no", "mixed"])
@pytest.mark.by_default("no")
def test_a_rank_refuses_alone_what_it_did_not_use_in_the_first_step(
    options: dict[str, Any], run_processes
) -> None:
    zero, one = run_processes(refused, [[[0, 1], [0, 1]], [[0, 1], [1, 0]], [[0, 1], [1, 2]]], options)
    assert zero == ["", "", ""]
    assert one[:2] == ["", ""]
    assert "heads.0.weight, heads.0.bias, heads.2.weight" in one[2]


def counted() -> list[int]:
    """All-reduces of each step."""
    run, model, stepper = started(Heads(), "SGD", True)
    counts, all_reduce = [], dist.all_reduce

    def counting(*args: Any, **kwargs: Any) -> Any:
        counts[-1] += 1
        return all_reduce(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", counting)
        for step in range(5):
            counts.append(0)
            run.backward(model(data(step)[run.process_index], [0]))
            stepper.step()
            stepper.zero_grad()
    for one in sharded_parameters(model):
        assert not one._unsharded_param._backward_hooks
        assert not one.sharded_param._backward_hooks
    run.end_training()
    return counts


def test_only_the_first_step_compares(run_processes) -> None:
    assert run_processes(counted) == [[1, 0, 0, 0, 0]] * 2


def unfrozen(sharded: bool) -> dict[str, Tensor]:
    """Head 1 trains from the second step on, and not in the fourth."""
    net = Heads()
    net.heads[1].requires_grad_(False)
    run, model, stepper = started(net, "AdamW", sharded)
    for step in range(5):
        net.heads[1].requires_grad_(step not in (0, 3))
        x = data(step)
        run.backward(model(x[run.process_index] if sharded else x.flatten(0, 1), [0, 1]))
        stepper.step()
        stepper.zero_grad()
    return weights(run, model)


def test_layers_may_be_frozen_and_unfrozen(run_processes) -> None:
    expected = unfrozen(False)
    for found in run_processes(unfrozen, True):
        torch.testing.assert_close(found, expected)


def of_two_optimizers(sharded: bool, finds: bool) -> dict[str, Tensor]:
    """The body's optimizer steps each time, the head's every other time, with the gradients of both."""
    plugins = [TIMEOUT, FullyShardedDataParallelPlugin(find_unused_parameters=finds)] if sharded else []
    run = Accelerator(device="cpu", strategy="fsdp" if sharded else "single", plugins=plugins)
    net = Heads()
    parts = (net.body, net.heads)
    model, *steppers = run.prepare(net, *(torch.optim.AdamW(part.parameters(), **DECAYS) for part in parts))
    for step in range(6):
        x = data(step)
        used = [2 * (step % 2)] if finds else [0]
        run.backward(model(x[run.process_index] if sharded else x.flatten(0, 1), used))
        for stepper in steppers[: 1 + step % 2]:
            stepper.step()
            stepper.zero_grad()
    return weights(run, model)


@pytest.mark.parametrize("finds", [False, pytest.param(True, marks=needs_zeros)])
@pytest.mark.by_default("False")
def test_two_optimizers_step_what_one_process_does(finds: bool, run_processes) -> None:
    expected = of_two_optimizers(False, finds)
    for found in run_processes(of_two_optimizers, True, finds):
        torch.testing.assert_close(found, expected)


def kept() -> list[list[bool]]:
    """Which heads have a gradient after a step without it; and after a window that was dropped."""
    run, model, stepper = started(Heads(), "SGD", True, **FINDS)
    found = []
    for used, clears in (([0], False), ([1], True), ([2], True), ([0], True)):
        run.backward(model(data(0)[run.process_index], used))
        if used == [2]:
            stepper.zero_grad()
            continue
        stepper.step()
        found.append([head.weight.grad is not None for head in model.heads])
        if clears:
            stepper.zero_grad()
    run.end_training()
    return found


@needs_zeros
@pytest.mark.full
def test_gradients_that_were_not_cleared_stay_and_dropped_ones_do_not_count(run_processes) -> None:
    expected = [[True, False, False], [True, True, False], [True, False, False]]
    assert run_processes(kept) == [expected] * 2


def test_an_older_torch_is_named_at_prepare(monkeypatch) -> None:
    monkeypatch.setattr("accel_fsdp.sharding.fsdp2.HAS_ZEROS", False)
    with pytest.raises(ConfigError, match=r"fsdp.find_unused_parameters needs torch 2.13"):
        started(Heads(), "SGD", True, **FINDS)


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
    stages = sized(pp=2, pp_split_points=["other"], find_unused_parameters=used is not None)
    plugins = [TIMEOUT, *stages] if pipeline else []
    run = Accelerator(device="cpu", strategy="fsdp" if pipeline else "single", plugins=plugins)
    model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), **DECAYS))

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
    return weights(run, model)


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

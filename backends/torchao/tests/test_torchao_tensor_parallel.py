"""Layers in float8 that two ranks split between them, by torchao's parallel styles and by torch's."""

from __future__ import annotations

import warnings
from typing import Any

import float8_problem as problem
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from accel_testing import ProcessError

pytestmark = pytest.mark.needs("accel-fsdp")


def plan(styles: str) -> dict[str, Any]:
    if styles == "torch":
        return {"block.up": ColwiseParallel(), "block.down": RowwiseParallel()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torchao's own import, for kernels that need a GPU
        from torchao.float8.float8_tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel

    return {"block.up": Float8ColwiseParallel(), "block.down": Float8RowwiseParallel()}


def by_hand(styles: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.distributed.init_process_group("gloo")
    chosen = lambda name: name.startswith("block")  # noqa: E731
    net = problem.float8_by_hand(problem.model(), "tensorwise", chosen)
    parallelize_module(net, init_device_mesh("cpu", (2,)), plan(styles))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for ids in problem.batches():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = net(ids[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    whole = {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in net.state_dict().items()
    }
    torch.distributed.destroy_process_group()
    return losses, whole


def ours(styles: str, recipe: str = "tensorwise") -> tuple[list[float], dict[str, torch.Tensor], list[str]]:
    from accel_fsdp import TorchTensorParallelPlugin

    split = TorchTensorParallelPlugin(tp_size=2, parallelize_plan=plan(styles))
    run = problem.accelerator("fsdp", split, recipe=recipe)
    losses, net, _ = problem.train(run)
    names = [name for name, value in net.named_parameters() if isinstance(value, DTensor)]
    weights = problem.weights(run, net)
    run.end_training()
    return losses, weights, names


@pytest.mark.parametrize("styles", ["torchao", "torch"])
@pytest.mark.by_default
def test_it_trains_as_the_same_styles_do_by_hand(styles: str, run_processes) -> None:
    losses, weights, split = run_processes(ours, styles, world=2)[0]
    wanted_losses, wanted = run_processes(by_hand, styles, world=2)[0]
    assert losses == wanted_losses
    assert {"block.up.weight", "block.down.weight"} <= set(split)
    for name, value in wanted.items():
        assert torch.equal(weights[name], value), name
    before = problem.model().state_dict()
    assert not any(torch.equal(weights[name], before[name]) for name in problem.CONVERTED)


@pytest.mark.full
def test_torchaos_styles_send_float8_which_rounds_once_more(run_processes) -> None:
    losses = {styles: run_processes(ours, styles, world=2)[0][0] for styles in ("torchao", "torch")}
    assert losses["torchao"] != losses["torch"]


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
@pytest.mark.by_default
def test_inputs_that_torchaos_styles_cast_are_refused_where_rows_have_scales(
    recipe: str, run_processes
) -> None:
    with pytest.raises(ProcessError, match="layer block.up gets an input .* with one scale"):
        run_processes(ours, "torchao", recipe, world=2)


def test_torchs_styles_serve_scales_of_rows(run_processes) -> None:
    losses, _, _ = run_processes(ours, "torch", "rowwise", world=2)[0]
    assert losses != run_processes(ours, "torch", world=2)[0][0]

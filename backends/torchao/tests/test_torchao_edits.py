"""Weights gathered in float8 that something else than the optimizer has written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from float8_problem import accelerator, batches, train
from torch.distributed.tensor import DTensor

EDITS = ("full_parameters", "in place", "one rank's shard", "load_state", "between micro-batches", "part")
Outputs = dict[str, list[torch.Tensor]]


def edit(how: str, run: Any, net: Any, folder: str) -> None:
    if how == "full_parameters":
        with run.full_parameters(net, writeback=True) as _, torch.no_grad():
            for parameter in net.block.parameters():
                parameter.mul_(8)
        return
    if how == "load_state":
        run.save_state(folder)
    with torch.no_grad():
        for parameter in net.block.parameters():
            if how == "one rank's shard":
                assert isinstance(parameter, DTensor)
                parameter.to_local().mul_(8 if run.is_main_process else 1)
            else:
                parameter.mul_(8)
    if how == "load_state":
        net(batches(1)[0])  # which computes scales, of other weights
        run.load_state(folder)


def outputs(gathers: bool, folder: str) -> Outputs:
    """By edit of trained weights: the outputs before it and after it, and the losses of a step after it."""
    found = {}
    for how in EDITS:
        from accel_fsdp import FullyShardedDataParallelPlugin

        blocks = FullyShardedDataParallelPlugin(
            auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
        )
        run = accelerator("fsdp", blocks, all_gather=gathers)
        _, net, optimizer = train(run, steps=2)
        ids = batches(1)[0]
        seen = [net(ids)]
        if how == "between micro-batches":
            run.backward(net(ids).square().mean())
        edit(how, run, net, f"{folder}/{how}")
        if how == "part":
            seen.append(net.block(torch.linspace(-1, 1, 8 * 32).view(8, 32)))
        with torch.no_grad():
            seen.append(net(ids))
        run.backward(net(ids).square().mean())
        optimizer.step()
        seen.append(net(ids))
        run.end_training()
        found[how] = [output.detach().float() for output in seen]
    return found


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory, run_processes) -> tuple[Outputs, Outputs]:
    """Gathered in float8, and not."""
    gathered, plain = (
        run_processes(outputs, gathers, str(tmp_path_factory.mktemp("states")), timeout=250)[0]
        for gathers in (True, False)
    )
    return gathered, plain


@pytest.mark.needs("accel-fsdp")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", EDITS)
@pytest.mark.full
def test_scales_are_those_of_the_weights_as_they_are(compared: tuple[Outputs, Outputs], how: str) -> None:
    gathered, plain = compared
    for number, (found, expected) in enumerate(zip(gathered[how], plain[how], strict=True)):
        torch.testing.assert_close(
            found, expected, atol=1e-5, rtol=1e-5, msg=lambda said, at=number: f"output {at}: {said}"
        )

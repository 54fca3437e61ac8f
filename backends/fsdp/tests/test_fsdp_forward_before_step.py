"""A forward between a backward and its step gathers weights: the step is seen by the forwards after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel_core import Accelerator, AccelError, ParallelismConfig
from accel_fsdp import FullyShardedDataParallelPlugin

pytestmark = pytest.mark.full

Case = tuple[dict[str, Any], bool, bool]
"""Options, whether the forward has a graph, whether gradients are clipped."""
CASES: list[Case] = [
    ({"fsdp_version": version, **options}, graph, clips)
    for version in (1, 2)
    for options in ({}, {"reshard_after_forward": False}, {"transformer_cls_names_to_wrap": ["Linear"]})
    for graph, clips in ((False, False), (False, True), (True, False))
    if version == 1 or not clips  # whose model.parameters() are whole ones then, which clipping refuses
]


class Around(torch.optim.Optimizer):
    """A wrapper of an optimizer, without the hooks that torch's `__init__` makes."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.defaults = inner, inner.defaults
        self.param_groups, self.state = inner.param_groups, inner.state

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


def trained(
    options: dict[str, Any] | None, graph: bool, clips: bool, wraps: bool = False
) -> tuple[Tensor, list[Tensor]]:
    """The losses of forwards before three steps, and the weights then.

    options: None for plain torch. wraps: the optimizer is inside another.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1)
    if wraps:
        optimizer = Around(optimizer)
    run = model = None
    if options is not None:
        run = Accelerator(device="cpu", strategy="fsdp", plugins=[FullyShardedDataParallelPlugin(**options)])
        model, optimizer = run.prepare(net, optimizer)
    call: Any = model or net
    seen = []
    for step in range(3):
        x = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(step)).double()
        if run is None:
            call(x).square().mean().backward()
        else:
            run.backward(call(x[run.process_index]).square().mean())
        with torch.set_grad_enabled(graph):
            seen.append(call(x[0]).square().mean().detach())
        if clips:
            clip = nn.utils.clip_grad_norm_ if run is None else run.clip_grad_norm_
            clip(call.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    weights = net.state_dict() if run is None else run.get_state_dict(model, rank0_only=False)
    found = [weights[name].clone() for name in sorted(weights)]
    if run is not None:
        run.end_training()
    return torch.stack(seen), found


def in_a_pipeline(pipeline: bool) -> list[Tensor]:
    """The weights after two steps, each of two windows and an evaluation. pipeline: or plain torch."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)).double()
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.randn(2, 3, 6, 4, generator=torch.Generator().manual_seed(1)).double()

    def loss(model: Any, batch: Tensor) -> tuple[Tensor, None]:
        return model(batch).square().mean(), None

    if not pipeline:
        for step in range(2):
            for batch, weight in zip(x[step], (0.5, 0.5, 1.0), strict=True):
                (loss(net, batch)[0] * weight).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        return [*net.state_dict().values()]
    stages = FullyShardedDataParallelPlugin(pp_split_points=["1"], transformer_cls_names_to_wrap=["Linear"])
    run = Accelerator(device="cpu", strategy="fsdp", plugins=[stages, ParallelismConfig(pp=2)])
    model, optimizer = run.prepare(net, optimizer)
    for step in range(2):
        run.forward_backward(model, iter(x[step, :2]), loss, microbatches=2)
        run.forward_backward(model, iter(x[step, 2:]), loss, microbatches=1)
        run.forward_backward(model, iter(x[step, 2:]), loss, microbatches=1, forward_only=True)
        run.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    found = run.get_state_dict(model, rank0_only=False)
    weights = [found[name].clone() for name in net.state_dict()]
    run.end_training()
    return weights


def test_windows_of_a_pipeline_add_up_to_one_step(run_processes) -> None:
    """One of another number of micro-batches, or an evaluation, makes torch learn shapes anew."""
    wanted = in_a_pipeline(pipeline=False)
    for found in run_processes(in_a_pipeline, True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)


def all_of(cases: list[Case]) -> list[tuple[Tensor, list[Tensor]]]:
    return [trained(*case) for case in cases]


def test_a_forward_between_backward_and_step_leaves_no_stale_weights(run_processes) -> None:
    for found in run_processes(all_of, CASES):
        for (options, graph, clips), (seen, weights) in zip(CASES, found, strict=True):
            wanted_seen, wanted = trained(None, graph, clips)
            torch.testing.assert_close(seen, wanted_seen, rtol=1e-12, atol=1e-14, msg=str(options))
            torch.testing.assert_close(weights, wanted, rtol=1e-12, atol=1e-14)


def wrapped() -> list[tuple[Tensor, list[Tensor]]]:
    return [trained({"fsdp_version": version}, True, False, wraps=True) for version in (1, 2)]


def test_nor_under_an_optimizer_without_torchs_hooks(run_processes) -> None:
    wanted = trained(None, True, False)
    for found in run_processes(wrapped):
        for seen in found:
            torch.testing.assert_close(seen, wanted, rtol=1e-12, atol=1e-14)


def clipped_between_forward_and_backward() -> str:
    run = Accelerator(cpu=True, plugins=[FullyShardedDataParallelPlugin()])
    model = run.prepare(nn.Linear(4, 4))
    model(torch.ones(2, 4))
    try:
        run.clip_grad_norm_(model.parameters(), 1.0)
    except AccelError as error:
        return str(error)
    return "nothing"


def test_clipping_between_forward_and_backward_names_the_forward(run_processes) -> None:
    for said in run_processes(clipped_between_forward_and_backward):
        assert "what a forward gathers until its backward" in said

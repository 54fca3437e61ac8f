"""A forward without a graph leaves no weights gathered, so that edits in place are kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel_core import Accelerator
from accel_fsdp import FullyShardedDataParallelPlugin

CASES: list[tuple[dict[str, Any], bool]] = [
    ({"fsdp_version": version, **options}, pending)
    for version in (1, 2)
    for options in (
        {},
        {"reshard_after_forward": False},
        {"transformer_cls_names_to_wrap": ["Linear"]},
        {"activation_checkpointing": True, "transformer_cls_names_to_wrap": ["Linear"]},
    )
    for pending in (False, True)
]


def trained(options: dict[str, Any] | None, pending: bool) -> list[Tensor]:
    """The weights after three steps, each with an evaluation and an edit. options: None for plain torch.

    pending: evaluate between a forward and its backward.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1)
    model: Any = net
    run = None
    if options is not None:
        run = Accelerator(device="cpu", strategy="fsdp", plugins=[FullyShardedDataParallelPlugin(**options)])
        model, optimizer = run.prepare(net, optimizer)
    for step in range(3):
        x = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(step)).double()
        if pending:
            loss = model(x if run is None else x[run.process_index]).square().mean()
        with torch.no_grad():
            model(x[0])
        if not pending:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.clamp_(-0.2, 0.2)
            loss = model(x if run is None else x[run.process_index]).square().mean()
        loss.backward() if run is None else run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    weights = net.state_dict() if run is None else run.get_state_dict(model, rank0_only=False)
    found = [weights[name].clone() for name in sorted(weights)]
    if run is not None:
        run.end_training()
    return found


def all_of(cases: list[tuple[dict[str, Any], bool]]) -> list[list[Tensor]]:
    return [trained(*case) for case in cases]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.by_default("2")
def test_a_weight_edited_after_an_evaluation_stays_edited(version: int, run_processes) -> None:
    cases = [case for case in CASES if case[0]["fsdp_version"] == version]
    for found in run_processes(all_of, cases):
        for (options, pending), weights in zip(cases, found, strict=True):
            wanted = trained(None, pending)
            torch.testing.assert_close(weights, wanted, rtol=1e-12, atol=1e-14, msg=f"{options} {pending}")

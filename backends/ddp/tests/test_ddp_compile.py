"""A model is compiled before it is wrapped: the wrapper's buckets still split the graph, names stay plain."""

from __future__ import annotations

import torch
from ddp_problem import accelerator, batches, equal, rank, weights
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from accel_core import TorchDynamoPlugin
from accel_ddp import DistributedDataParallelKwargs


class Wide(nn.Module):
    """Some 3 MiB of float32 in each of two layers, so that buckets of 1 MiB separate them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(6, 800), nn.Linear(800, 800), nn.Linear(800, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


def trained(backend: str | None) -> tuple[dict[str, torch.Tensor], int, list[str]]:
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.register_backend(count, name="count_graphs")
    run = accelerator(DistributedDataParallelKwargs(bucket_cap_mb=1), TorchDynamoPlugin(backend=backend))
    model = Wide()
    wrapped, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert isinstance(wrapped, DistributedDataParallel)
    assert run.unwrap_model(wrapped) is model
    for x, y in batches(3, rank()):
        run.backward(F.mse_loss(wrapped(x), y))
        optimizer.step()
        optimizer.zero_grad()
    names = list(run.run.units[0].named_parameters())
    eager = run.unwrap_model(wrapped, keep_torch_compile=False)
    assert eager.second.weight is model.second.weight
    result = weights(model)
    run.end_training()
    return result, len(graphs), names


def test_training_is_that_of_the_uncompiled_model_in_graphs_that_follow_the_buckets(run_processes) -> None:
    plain = run_processes(trained, None)
    compiled = run_processes(trained, "count_graphs")
    for (expected, none, names), (found, graphs, same) in zip(plain, compiled, strict=True):
        assert (none, names) == (0, same)
        assert graphs > 1
        assert equal(found, expected)


def trained_by_a_compiled_view() -> tuple[list[dict[str, torch.Tensor]], list[list[str]], bool]:
    """Weights after two windows with and without `torch.compile(prepared)`; its names; what it unwraps to."""
    found, names = [], []
    for compiles in (False, True):
        run = accelerator(gradient_accumulation_steps=2)
        given = nn.Linear(6, 1)
        torch.nn.init.constant_(given.weight, 0.5)
        torch.nn.init.constant_(given.bias, 0.5)
        model, optimizer = run.prepare(given, torch.optim.SGD(given.parameters(), lr=0.1))
        view = torch.compile(model, backend="eager") if compiles else model
        for x, y in batches(4, rank()):
            with run.accumulate(view):
                run.backward(F.mse_loss(view(x), y))
                optimizer.step()
                optimizer.zero_grad()
        with run.no_sync(view):
            assert not model.require_backward_grad_sync
        found.append(weights(given))
        names.append([*run.get_state_dict(view)])
        unwraps = run.unwrap_model(view) is given
        run.end_training()
    return found, names, unwraps


def test_a_prepared_model_that_the_user_compiles_is_known_as_the_prepared_one(run_processes) -> None:
    for (plain, compiled), names, unwraps in run_processes(trained_by_a_compiled_view):
        assert equal(compiled, plain)
        assert names == [["weight", "bias"]] * 2
        assert unwraps

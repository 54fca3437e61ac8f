"""docs/steps.md, "Freeze and unfreeze": both recipes train as plain PyTorch does in one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel_core import Accelerator, AccelError
from accel_ddp import DistributedDataParallelKwargs


class LoRA(nn.Module):
    """A frozen linear layer, and an adapter of rank 2 beside it."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Linear(inner.in_features, 2, bias=False)
        self.up = nn.Linear(2, inner.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.up(self.down(x))  # type: ignore[no-any-return]


def network(kind: str) -> tuple[nn.Module, nn.Module]:
    """A model, and the part of it that trains from the second epoch on."""
    torch.manual_seed(0)
    first, last = nn.Linear(4, 6), nn.Linear(6, 2)
    if kind == "gradual":
        return nn.Sequential(first, nn.Tanh(), last), first
    return nn.Sequential(LoRA(first), nn.Tanh(), LoRA(last)), last


def loader(processes: int) -> DataLoader[torch.Tensor]:
    return DataLoader(torch.linspace(-1, 1, 64).view(16, 4), 8 // processes)  # type: ignore[arg-type]


def plain(kind: str) -> list[torch.Tensor]:
    """Weights after an epoch with the part frozen, and two more with all."""
    model, part = network(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for epoch in range(3):
        part.requires_grad_(epoch > 0)
        for x in loader(1):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def freeze_after_prepare(kind: str) -> list[torch.Tensor]:
    accelerator = Accelerator(cpu=True, plugins=[DistributedDataParallelKwargs(find_unused_parameters=True)])
    user, part = network(kind)
    part.requires_grad_(True)
    data = loader(accelerator.num_processes)
    optimizer = torch.optim.AdamW(user.parameters(), lr=0.05)
    model, optimizer, data = accelerator.prepare(user, optimizer, data)
    for epoch in range(3):
        part.requires_grad_(epoch > 0)
        train(accelerator, model, optimizer, data)
    return weights(accelerator, user)


def prepare_again(kind: str) -> list[torch.Tensor]:
    accelerator = Accelerator(cpu=True)
    user, part = network(kind)
    part.requires_grad_(False)
    data = loader(accelerator.num_processes)
    optimizer = torch.optim.AdamW(user.parameters(), lr=0.05)
    model, optimizer, data = accelerator.prepare(user, optimizer, data)
    train(accelerator, model, optimizer, data)
    accelerator.free_memory()
    part.requires_grad_(True)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    for _ in range(2):
        train(accelerator, model, optimizer, data)
    return weights(accelerator, user)


def train(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, data: object) -> None:
    for x in data:  # type: ignore[attr-defined]
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def weights(accelerator: Accelerator, model: nn.Module) -> list[torch.Tensor]:
    found = [p.detach() for p in model.parameters()]
    accelerator.end_training()
    return found


@pytest.mark.parametrize("kind", ["gradual", "lora"])
@pytest.mark.parametrize("recipe", [freeze_after_prepare, prepare_again])
def test_both_recipes_train_as_plain_pytorch_does(recipe, kind, run_processes) -> None:
    for found in run_processes(recipe, kind, world=2):
        torch.testing.assert_close(found, plain(kind))


def unfrozen_too_late() -> str:
    accelerator = Accelerator(cpu=True)
    user, part = network("gradual")
    part.requires_grad_(False)
    model, _ = accelerator.prepare(user, torch.optim.AdamW(user.parameters()))
    part.requires_grad_(True)
    with pytest.raises(AccelError) as caught:
        accelerator.backward(model(torch.ones(2, 4)).mean())
    accelerator.end_training()
    return str(caught.value)


def test_unfreezing_what_was_frozen_in_prepare_is_an_error_with_both_recipes(run_processes) -> None:
    message, _ = run_processes(unfrozen_too_late, world=2)

    assert "2 parameter(s) were frozen when the model was prepared and are trained now (0.weight)" in message
    assert "freeze them after prepare" in message
    assert "accelerator.free_memory(), unfreeze, and prepare model, optimizers and loaders again" in message

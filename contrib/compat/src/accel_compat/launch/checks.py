"""The script of `accelerate test`."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.utils.data import DataLoader

from accel_compat.accelerator.accelerator import Accelerator


def main() -> None:
    """Check that processes communicate, share data, and train as one process would.

    Collective.

    Raises:
        AssertionError: something is not as it has to be.
    """
    accelerator: Any = Accelerator()
    world, device = accelerator.num_processes, accelerator.device
    ranks = accelerator.gather(torch.tensor([accelerator.process_index], device=device))
    _require(ranks.tolist() == list(range(world)), f"ranks {list(range(world))} gathered as {ranks.tolist()}")

    samples: Any = torch.arange(8 * world + 3).float().unsqueeze(1)
    plain = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(plain.weight, 0.5)
    torch.nn.init.zeros_(plain.bias)
    trained = copy.deepcopy(plain)
    model, optimizer, loader = accelerator.prepare(
        trained, torch.optim.SGD(trained.parameters(), lr=1e-3), DataLoader(samples, batch_size=4)
    )
    read = [accelerator.gather_for_metrics(batch) for batch in loader]
    _require(torch.equal(torch.cat(read).cpu(), samples), "a dataloader's samples are not all read once")

    mine = samples[:world].to(device)[accelerator.process_index]
    accelerator.backward(model(mine).pow(2).mean())
    optimizer.step()
    plain(samples[:world]).pow(2).mean().backward()
    expected = [p.detach() - 1e-3 * p.grad for p in plain.parameters() if p.grad is not None]
    found = [p.detach().float().cpu() for p in accelerator.unwrap_model(model).parameters()]
    same = all(torch.allclose(one, other, rtol=1e-2) for one, other in zip(found, expected, strict=True))
    _require(same, f"a step gives {found}, plain PyTorch {expected}")
    accelerator.print(f"{world} process(es) on {device.type}: communication, data and training are right")
    accelerator.end_training()


def _require(right: bool, otherwise: str) -> None:
    if not right:
        raise AssertionError(otherwise)


if __name__ == "__main__":
    main()

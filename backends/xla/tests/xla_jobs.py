"""What the processes of the tests do, on XLA's CPU device, and the problem they train."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from accel_core import Accelerator, ParallelismConfig
from accel_xla import SpmdConfig, XlaConfig

BATCH, BATCHES = 8, 6
NATIVE: dict[str, Any] = {"device": "cpu"}
XLA: dict[str, Any] = {"device": "xla"}
SPMD: dict[str, Any] = {"device": "xla", "strategy": "xla-spmd"}


class Net(nn.Module):
    """Linear, batch norm, and a head whose weight is the first layer's transposed use: tied."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.outer = nn.Linear(6, 6, bias=False)
        self.outer.weight = self.inner.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.tanh(self.norm(self.inner(x))))


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    shape = (BATCH * BATCHES, 6)
    return TensorDataset(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))


def made(stack: dict[str, Any], workers: int = 0, **more: Any) -> Any:
    """(accelerator, model, optimizer, loader), prepared."""
    accelerator = Accelerator(**stack, **more)
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    loader = DataLoader(data(), BATCH, num_workers=workers)
    return (accelerator, *accelerator.prepare(model, optimizer, loader))


def train(accelerator: Any, model: Any, optimizer: Any, loader: Any) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each batch."""
    found = []
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        found.append((loss.item(), 0.0 if norm is None else norm.item()))
    return found


def trained(stack: dict[str, Any], **more: Any) -> list[tuple[float, float]]:
    parts = made(stack, **more)
    found = train(*parts)
    parts[0].end_training()
    return found


def spmd_config(**sizes: int) -> list[object]:
    return [SpmdConfig(cpu_devices=4), ParallelismConfig(**sizes)]


def spmd_trained(**sizes: int) -> list[tuple[float, float]]:
    return trained(SPMD, plugins=spmd_config(**sizes))


def spmd_replicated() -> list[tuple[float, float]]:
    return spmd_trained(dp_replicate=-1)


def spmd_both() -> list[tuple[float, float]]:
    return spmd_trained(dp_replicate=2)


def shardings() -> dict[str, Any]:
    """Where parameters, optimizer state, batches and outputs lie, and the mesh."""
    accelerator, model, optimizer, loader = made(SPMD, plugins=spmd_config())
    import torch_xla

    spec = torch_xla._XLAC._get_xla_sharding_spec
    found: dict[str, Any] = {}
    for x, y in loader:
        output = model(x)
        found["batch"], found["output"] = spec(x), spec(output)
        accelerator.backward(nn.functional.mse_loss(output, y))
        optimizer.step()
        optimizer.zero_grad()
    found |= {name: spec(parameter) for name, parameter in model.named_parameters()}
    found["exp_avg"] = spec(next(iter(optimizer.state.values()))["exp_avg"])
    found["mesh"] = [(dim.name, dim.size) for dim in accelerator.run.mesh.dims]
    found["topology"] = (accelerator.run.topology.reader, accelerator.run.topology.readers)
    accelerator.end_training()
    return found


def save(stack: dict[str, Any], folder: str, **more: Any) -> list[tuple[float, float]]:
    """Train an epoch, save, and train another, which is returned."""
    accelerator, model, optimizer, loader = made(stack, **more)
    train(accelerator, model, optimizer, loader)
    accelerator.save_state(folder)
    found = train(accelerator, model, optimizer, loader)
    accelerator.end_training()
    return found


def resume(stack: dict[str, Any], folder: str, **more: Any) -> tuple[list[tuple[float, float]], str]:
    """The epoch after a checkpoint, and where the optimizer's state lay at its beginning."""
    accelerator, model, optimizer, loader = made(stack, **more)
    accelerator.load_state(folder)
    state = next(iter(optimizer.state.values()))["exp_avg"]
    where = ""
    if state.device.type == "xla":
        import torch_xla

        where = torch_xla._XLAC._get_xla_sharding_spec(state)
    found = train(accelerator, model, optimizer, loader)
    accelerator.end_training()
    return found, where


def boxes(folder: str) -> dict[str, list[Any]]:
    """The boxes of each leaf of the model, under SPMD."""
    accelerator, *_ = made(SPMD, plugins=spmd_config(dp_replicate=2))
    import torch_xla

    torch_xla.sync()
    (unit,) = accelerator.run.units
    state = unit.hooks.model_state(unit)
    found = {
        name: [(offset, tuple(part.shape)) for offset, part in leaf.shards] for name, leaf in state.items()
    }
    accelerator.end_training()
    return found


def cuts(accumulation: int, workers: int) -> list[str]:
    """What happens in an epoch: points at which core may end the graph, and graphs that ended."""
    import torch_xla

    events: list[str] = []
    real = torch_xla.sync

    @functools.wraps(real)
    def sync(*arguments: Any, **options: Any) -> None:
        events.append("sync")
        real(*arguments, **options)

    torch_xla.sync = sync
    accelerator, model, optimizer, loader = made(
        XLA, workers=workers, gradient_accumulation_steps=accumulation
    )
    events.clear()
    for x, y in loader:
        events.append("batch")
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            events.append("backward")
            optimizer.step()
            optimizer.zero_grad()
    accelerator.end_training()
    return events


class Structured(nn.Module):
    """Has its body take and return structures, which a function of a plugin computes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 1)
        self.function: Any = None

    def forward(self, x: torch.Tensor) -> Any:
        scale = (self.outer.weight.sum(),)
        body = self.body if self.function is None else functools.partial(self.function, self.body)
        return self.outer(body({"x": x}, scale=scale)["y"])

    def body(self, inputs: dict[str, torch.Tensor], scale: tuple[torch.Tensor]) -> dict[str, Any]:
        return {"y": torch.tanh(self.inner(inputs["x"])) * scale[0], "name": None}


def recomputed(recompute: bool) -> tuple[list[float], str]:
    """Weights after three steps, and what is said of a result that is no structure of tensors."""
    accelerator = Accelerator(**XLA)
    torch.manual_seed(0)
    model = Structured()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    (unit,) = accelerator.run.units
    function = unit.hooks.checkpoint_function(unit)
    model.function = function if recompute else None
    for _ in range(3):
        accelerator.backward(model(torch.randn(5, 4).to(accelerator.device)).square().sum())
        optimizer.step()
        optimizer.zero_grad()
    weights = [number for each in model.parameters() for number in each.detach().cpu().flatten().tolist()]
    try:
        function(object)
        said = ""
    except TypeError as error:
        said = str(error)
    accelerator.end_training()
    return weights, said


def tied() -> tuple[bool, int]:
    accelerator, model, optimizer, _ = made(XLA)
    same = model.outer.weight is model.inner.weight
    held = len(optimizer.param_groups[0]["params"])
    accelerator.end_training()
    return same, held


class Broken(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 9:
            raise ValueError("sample 9 is damaged")
        return torch.full((2,), float(index))


def broken() -> tuple[int, str]:
    accelerator = Accelerator(**XLA)
    loader = accelerator.prepare(DataLoader(Broken(), 2, num_workers=1))
    seen = 0
    try:
        for _ in loader:
            seen += 1
    except ValueError as error:
        return seen, str(error)
    finally:
        accelerator.end_training()
    return seen, ""


def left_early() -> list[list[float]]:
    """The first batches of two epochs, both left early."""
    accelerator = Accelerator(**XLA)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(32.0)), 2, num_workers=1))
    found = []
    for _ in range(2):
        for (batch,) in loader:
            assert batch.device == accelerator.device
            found.append(batch.tolist())
            break
    accelerator.end_training()
    return found


def refused(stack: dict[str, Any], **more: Any) -> str:
    try:
        Accelerator(**stack, **more)
    except Exception as error:  # of any kind: the test reads its type and text
        return f"{type(error).__name__}: {error}"
    return ""


def spmd_after_all() -> str:
    first = Accelerator(**XLA)
    torch.ones(2).to(first.device).sum().item()
    first.end_training()
    return refused(SPMD)


def lost_device() -> str:
    os.environ.pop("PJRT_DEVICE", None)
    return refused(XLA)


def named_device() -> str:
    os.environ.pop("PJRT_DEVICE", None)
    accelerator = Accelerator(**XLA, plugins=[XlaConfig(pjrt_device="CPU")])
    named = os.environ["PJRT_DEVICE"]
    accelerator.end_training()
    return named

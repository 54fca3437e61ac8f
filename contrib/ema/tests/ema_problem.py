"""Small trainings whose weights are averaged, and the formula on whole weights: the judge of these tests.

Runs in workers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from accel_core import Accelerator
from accel_ema import EMAConfig, averaged

STEPS = 5


class Net(nn.Module):
    """Tied and frozen weights, a buffer, and sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(7, 5)
        self.fixed = nn.Linear(5, 5).requires_grad_(requires_grad=False)
        self.there, self.back = nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)
        self.back.weight = self.there.weight
        self.last = nn.Linear(5, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        output: Tensor = self.last(self.back(torch.tanh(self.there(self.fixed(self.first(x))))))
        return output


class Grid(nn.Sequential):
    """Layers that tensor parallelism splits."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__(nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, 4), nn.Linear(4, 3))


def strategy(way: str) -> list[Any]:
    """Return the plugins of a stack, by its short name."""
    name, _, variant = way.partition("-")
    if name in ("single", "ddp"):
        return []
    if name == "deepspeed":
        from accel_deepspeed import DeepSpeedPlugin

        stage, _, precision = variant.partition("-")
        half = {precision: {"enabled": True}} if precision else {}
        return [DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": int(stage)}, **half})]
    from accel_fsdp import FullyShardedDataParallelPlugin, TorchTensorParallelPlugin

    sharded = FullyShardedDataParallelPlugin(fsdp_version=1 if variant == "1" else 2)
    if variant != "tp":
        return [sharded]
    return [sharded, TorchTensorParallelPlugin(tp_size=2, parallelize_plan={"0": "colwise", "2": "rowwise"})]


class Job:
    """A prepared run whose weights are averaged."""

    def __init__(self, way: str, options: dict[str, Any], **more: Any) -> None:
        self.config = EMAConfig(**options)
        plugins = [*strategy(way), self.config]
        self.accelerator = Accelerator(cpu=True, plugins=plugins, **more)
        module = Grid() if way.endswith("tp") else Net()
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.05)
        self.model, self.optimizer = self.accelerator.prepare(module, optimizer)
        self.dtype = next(self.model.parameters()).dtype

    def micro_batch(self, number: int) -> float:
        """Train on a batch, which is the same on all ranks."""
        x = torch.randn(4, 7, generator=torch.Generator().manual_seed(number))
        with self.accelerator.accumulate(self.model):
            loss = self.model(x.to(self.dtype)).float().square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.item()

    def evaluate(self) -> Tensor:
        """Return the model's output of fixed inputs."""
        self.model.eval()
        x = torch.linspace(-1, 1, 28).view(4, 7)
        with torch.no_grad():
            output: Tensor = self.model(x.to(self.dtype)).float().clone()
        self.model.train()
        return output

    def weights(self) -> dict[str, Tensor]:
        """Return the most precise weights, whole."""
        named = self.accelerator.iter_weights(self.model, dtype=torch.float32)
        return {name: tensor.clone() for name, tensor in named}

    def average(self) -> dict[str, Tensor]:
        with averaged(self.model):
            return self.weights()


def formula(decays: list[float], history: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return decay * average + (1 - decay) * weights, update after update, on whole weights."""
    found: dict[str, Tensor] = {}
    for decay, weights in zip(decays, history, strict=True):
        found = {
            name: tensor.double() if not decay else decay * found[name] + (1 - decay) * tensor.double()
            for name, tensor in weights.items()
        }
    return found


def trained(way: str, options: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Train, and compare the average with the formula, and evaluations with those of such a model."""
    job = Job(way, options, **more)
    history, counted = [], []
    for number in range(STEPS * job.accelerator.gradient_accumulation_steps):
        job.micro_batch(number)
        if job.accelerator.sync_gradients:
            counted.append(job.weights())
    config = job.config
    history = counted[config.update_after :: config.update_every]
    expected = formula([config.decay_at(number) for number in range(len(history))], history)
    before, plain = job.weights(), job.evaluate()
    with averaged(job.model):
        inside, output = job.weights(), job.evaluate()
        buffer = inside.get("seen")
    after, again = job.weights(), job.evaluate()
    job.accelerator.end_training()
    reference = Grid() if way.endswith("tp") else Net()
    reference.load_state_dict({name: tensor.float() for name, tensor in expected.items()}, strict=False)
    if hasattr(reference, "back"):
        reference.back.weight = reference.there.weight
    with torch.no_grad():
        judged = reference.eval()(torch.linspace(-1, 1, 28).view(4, 7))
    return {
        "average": {name: tensor for name, tensor in inside.items() if name != "seen"},
        "formula": {name: tensor.float() for name, tensor in expected.items() if name != "seen"},
        "moved": max((inside[name] - before[name]).abs().max().item() for name in inside),
        "restored": all(torch.equal(before[name], after[name]) for name in before),
        "outputs": (output, judged),
        "plain": torch.equal(plain, again) and not torch.equal(plain, output),
        "buffer": None if buffer is None else (buffer.item(), before["seen"].item()),
        "steps": len(counted),
    }


def evaluated_between(way: str, *, evaluates: bool) -> dict[str, Tensor]:
    """Return the weights after a training with or without evaluations of the average between steps."""
    job = Job(way, {"decay": 0.5})
    for number in range(STEPS):
        job.micro_batch(number)
        if evaluates:
            job.evaluate()
            with averaged(job.model):
                job.evaluate()
    return job.weights()


def continued(
    way: str, source: str | None, target: str | None, first: int, steps: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Load, train, save; return the average and the weights."""
    job = Job(way, {"decay": 0.75, "update_after": 1})
    if source is not None:
        job.accelerator.load_state(source)
    for number in range(first, first + steps):
        job.micro_batch(number)
    if target is not None:
        job.accelerator.save_state(target)
    return job.average(), job.weights()


def exported(way: str, folder: str) -> dict[str, Tensor]:
    """Save the averaged model as other libraries read it; return the average."""
    job = Job(way, {"decay": 0.5})
    for number in range(STEPS):
        job.micro_batch(number)
    with averaged(job.model):
        job.accelerator.save_model(job.model, folder)
    return job.average()


def edited(way: str) -> tuple[float, float]:
    """Edit a weight in place; return it before and after an evaluation of the average."""
    job = Job(way, {"decay": 0.5})
    for number in range(2):
        job.micro_batch(number)
    edited = dict(job.accelerator.unwrap_model(job.model).named_parameters())["last.bias"]
    with torch.no_grad():
        edited.fill_(3)
    before = edited[0].item()
    job.average()
    return before, edited[0].item()


def overflowed(world: int) -> tuple[list[bool], dict[str, Tensor], dict[str, Tensor]]:
    """Train in float16; the gradients of some steps overflow. Return which, the average and the formula."""
    job = Job("ddp" if world > 1 else "single", {"decay": 0.5, "warmup": "none"}, mixed_precision="fp16")
    skipped, history = [], []
    for number in range(STEPS):
        x = torch.randn(4, 7, generator=torch.Generator().manual_seed(number))
        loss = job.model(x).float().square().mean()
        job.accelerator.backward(loss * (float("inf") if number in (1, 3) else 1.0))
        job.optimizer.step()
        job.optimizer.zero_grad()
        skipped.append(job.optimizer.step_was_skipped)
        if not job.optimizer.step_was_skipped:
            history.append(job.weights())
    expected = formula([0.0] + [0.5] * (len(history) - 1), history)
    found = {name: tensor for name, tensor in job.average().items() if name != "seen"}
    return skipped, found, {name: expected[name].float() for name in found}

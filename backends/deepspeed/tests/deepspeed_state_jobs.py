"""What each rank of test_deepspeed_state does: a small training whose state an engine holds, or torch."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from accel_core import Accelerator, CheckpointError
from accel_deepspeed import DeepSpeedPlugin

STEPS = 3


class Net(nn.Module):
    """Tied and frozen weights, a buffer, and sizes that no number of ranks divides."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(7, 5)
        self.fixed = nn.Linear(5, 5).requires_grad_(requires_grad=False)
        self.there, self.back = nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)
        self.back.weight = self.there.weight
        self.last = nn.Linear(5, 3)
        self.register_buffer("seen", torch.full((3,), float(seed)))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.back(torch.tanh(self.there(self.fixed(self.first(x))))))
        return output


class Job:
    """A prepared run; `how` is DeepSpeed's JSON, or None for a run without it.

    Groups: matrices, vectors with another decay; the frozen ones are among them, as users' often are.
    """

    def __init__(
        self,
        how: Mapping[str, Any] | None,
        seed: int,
        *,
        algorithm: str = "AdamW",
        frozen: str | None = None,
        **more: Any,
    ) -> None:
        plugins = [] if how is None else [DeepSpeedPlugin(hf_ds_config=how)]
        self.accelerator = Accelerator(cpu=True, plugins=plugins, **more)
        self.module = Net(seed)
        if frozen is not None:
            self.module.get_parameter(frozen).requires_grad_(requires_grad=False)
        groups: list[dict[str, Any]] = [
            {"params": [p for p in self.module.parameters() if p.ndim > 1]},
            {"params": [p for p in self.module.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ]
        given = {"momentum": 0.9} if algorithm == "SGD" else {}
        optimizer = getattr(torch.optim, algorithm)(groups, lr=0.01 + seed, **given)
        self.model, self.optimizer = self.accelerator.prepare(self.module, optimizer)

    def train(self, first: int, steps: int = STEPS) -> list[float]:
        """Losses; all ranks have the same batches, so that one arithmetic serves all world sizes."""
        losses = []
        for step in range(first, first + steps):
            x = torch.randn(4, 7, generator=torch.Generator().manual_seed(step))
            dtype = next(self.module.parameters()).dtype
            loss = self.model(x.to(dtype)).float().square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def state(self, path: str) -> Tensor:
        """This rank's only part of what the optimizer keeps under that path."""
        (unit,) = self.accelerator.run.units
        return unit.hooks.optimizer_state(unit, unit.optimizers[0]).leaves[path].shards[0][1].clone()

    def weights(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        return {name: each.clone() for name, each in self.accelerator.iter_weights(self.model, dtype=dtype)}


def saves(folder: str, ways: Mapping[str, Any], **more: Any) -> dict[str, list[float]]:
    """Way -> the losses that follow its checkpoint, which is named after it."""
    found = {}
    for name, how in ways.items():
        job = Job(how, 0, **more)
        job.train(0)
        job.accelerator.save_state(str(Path(folder, name)))
        found[name] = job.train(STEPS)
        job.accelerator.end_training()
    return found


def resumes(folder: str, saved: list[str], ways: Mapping[str, Any], **more: Any) -> dict[str, list[float]]:
    """ "SAVER -> WAY" -> the losses that follow, in a run that began elsewhere and has taken a step."""
    found = {}
    for name, how in ways.items():
        job = Job(how, 1, **more)
        job.train(50, 1)
        for saver in saved:
            job.accelerator.load_state(str(Path(folder, saver)))
            found[f"{saver} -> {name}"] = job.train(STEPS)
        job.accelerator.end_training()
    return found


def weights_of(how: Mapping[str, Any], folder: str) -> dict[str, dict[str, Tensor]]:
    """The weights by each of the ways in which they can be had."""
    job = Job(how, 0)
    job.train(0)
    job.accelerator.save_state(str(Path(folder, "state")))
    job.accelerator.save_model(job.model, str(Path(folder, "model")))
    found = {"live": job.weights(), "float32": job.weights(torch.float32)}
    found["saved"] = load_file(Path(folder, "model", "model.safetensors"))
    with job.accelerator.full_parameters(job.model):
        found["full"] = {name: p.detach().clone() for name, p in job.module.named_parameters()}
        with torch.no_grad():
            job.model(torch.zeros(1, 7, dtype=job.module.last.weight.dtype))
        found["after a forward"] = {name: p.detach().clone() for name, p in job.module.named_parameters()}
    job.train(STEPS, 1)
    job.accelerator.end_training()
    return found


def writes(how: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float]]:
    """Masters before and after one weight was written, and losses after that."""
    job = Job(how, 0)
    job.train(0)
    before = job.weights(torch.float32)
    with job.accelerator.full_parameters(job.model, ["last.bias"], writeback=True), torch.no_grad():
        job.module.last.bias.fill_(0.5)
    after = job.weights(torch.float32)
    losses = job.train(STEPS)
    job.accelerator.end_training()
    return before, after, losses


def counts(how: Mapping[str, Any], folder: str) -> tuple[int, int]:
    """The engine's steps as saved, and in a run that loads them."""
    saved = Job(how, 0)
    saved.train(0)
    saved.accelerator.save_state(folder)
    saved.accelerator.end_training()
    loaded = Job(how, 1)
    loaded.accelerator.load_state(folder)
    return saved.model.global_steps, loaded.model.global_steps


def mixes(
    how: Mapping[str, Any] | None, folder: str, *, save: bool, late: bool = False
) -> tuple[str, float, list[float], bool]:
    """Natively one bias is never stepped, or later than the rest.

    What is said of that, its moments, the steps that all have, and whether weights stayed what they were.
    """
    job = Job(how, 0)
    if save:
        job.module.last.bias.requires_grad_(requires_grad=False)
        job.train(0)
        job.module.last.bias.requires_grad_()
        if late:
            job.train(STEPS, 1)
        job.accelerator.save_state(folder)
        return "", 0.0, [], True
    job.train(50, 1)
    before, said = job.weights(), Said()
    try:
        with said:
            job.accelerator.load_state(folder, strict=not late)
    except Exception as error:  # of any kind: the test reads its text
        said.lines.append(str(error))
    after = job.weights()
    return (
        "\n".join(said.lines),
        float(job.state("last.bias/exp_avg").abs().sum()),
        sorted({float(job.state(f"{name}/step")) for name in ("first.bias", "last.bias")}),
        all(torch.equal(before[name], each) for name, each in after.items()),
    )


def freezes(how: Mapping[str, Any] | None, folder: str) -> tuple[str, list[float]]:
    """Go on with a layer that is frozen since the checkpoint: what is said, and losses of two runs."""
    job, said = Job(how, 1, frozen="first.bias"), Said()
    with said:
        job.accelerator.load_state(folder)
    losses = job.train(STEPS)
    job.accelerator.save_state(f"{folder}-2")
    job.accelerator.end_training()
    job = Job(how, 2, frozen="first.bias")
    job.accelerator.load_state(f"{folder}-2")
    losses += job.train(2 * STEPS)
    job.accelerator.end_training()
    return "\n".join(said.lines), losses


class Said(logging.Handler):
    """What is logged inside."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> None:
        logging.getLogger().addHandler(self)

    def __exit__(self, *args: object) -> None:
        logging.getLogger().removeHandler(self)


def again(how: Mapping[str, Any], folder: str, *, between: bool) -> tuple[list[float], ...]:
    """Losses of one run, of one that was saved and loaded twice, and the steps in its last checkpoint."""
    job = Job(how, 0)
    job.train(0)
    job.accelerator.save_state(f"{folder}/1")
    expected = job.train(STEPS) + job.train(2 * STEPS)
    job.accelerator.end_training()
    job = Job(how, 1)
    job.accelerator.load_state(f"{folder}/1")
    if between:
        job.accelerator.save_state(f"{folder}/between")
    found = job.train(STEPS)
    job.accelerator.save_state(f"{folder}/2")
    job.accelerator.end_training()
    job = Job(how, 2)
    job.accelerator.load_state(f"{folder}/2")
    (unit,) = job.accelerator.run.units
    leaves = unit.hooks.optimizer_state(unit, unit.optimizers[0]).leaves
    steps = {float(leaf.shards[0][1]) for name, leaf in leaves.items() if name.endswith("/step")}
    found += job.train(2 * STEPS)
    job.accelerator.end_training()
    return expected, found, steps


def names_in_boxes(how: Mapping[str, Any]) -> dict[str, int]:
    """How many elements of each weight this rank offers to be saved."""
    job = Job(how, 0)
    (unit,) = job.accelerator.run.units
    leaves = unit.hooks.model_state(unit)
    found = {name: sum(part.numel() for _, part in leaf.shards) for name, leaf in leaves.items()}
    job.accelerator.end_training()
    return found


def saves_async(how: Mapping[str, Any], folder: str) -> tuple[list[float], list[float]]:
    """A save that is written while training goes on, and what is loaded from it."""
    job = Job(how, 0)
    job.train(0)
    job.accelerator.save_state(folder, wait=False)
    expected = job.train(STEPS)
    job.accelerator.load_state(folder)
    found = job.train(STEPS)
    job.accelerator.end_training()
    return found, expected


class Counting(torch.optim.AdamW):
    """Keeps a number beside the state of its parameters."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": 5}


def saves_what_belongs_to_no_parameter(folder: str) -> str:
    accelerator = Accelerator(cpu=True, plugins=[DeepSpeedPlugin(zero_stage=1)])
    module = nn.Linear(2, 2)
    accelerator.prepare(module, Counting(module.parameters()))
    try:
        accelerator.save_state(folder)
    except CheckpointError as error:
        return str(error)
    return "saved"


class NoOp:
    """DeepSpeed's C++ op for Adam on CPUs, which takes half a minute to compile: here it moves nothing."""

    def load(self) -> NoOp:
        return self

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


def says(adamw: bool) -> tuple[str, dict[str, Any]]:
    """Return the algorithm and the first group that a checkpoint has of DeepSpeed's Adam for CPUs."""
    from deepspeed.ops.adam import cpu_adam

    cpu_adam.CPUAdamBuilder = NoOp
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    accelerator = Accelerator(cpu=True, plugins=[DeepSpeedPlugin(hf_ds_config={"zero_optimization": zero})])
    model: Any = Net(0)
    own = cpu_adam.DeepSpeedCPUAdam(model.parameters(), lr=0.01, adamw_mode=adamw)
    model, _ = accelerator.prepare(model, own)
    accelerator.backward(model(torch.ones(4, 7)).square().mean())
    (unit,) = accelerator.run.units
    found = unit.hooks.optimizer_state(unit, unit.optimizers[0])
    accelerator.end_training()
    return found.algorithm, dict(found.groups[0])


def scales(saved: Mapping[str, Any], loaded: Mapping[str, Any], folder: str) -> list[tuple[float, float]]:
    """Return (loss scale, norm of the gradients) as saved, of a new run, and of that after it has loaded."""
    import deepspeed

    type(deepspeed.get_accelerator()).is_fp16_supported = lambda _: True
    found = []
    for number, how in enumerate((saved, loaded)):
        job = Job({"zero_optimization": {"stage": 2}, **how}, 0, algorithm="SGD")
        found.append(_scale_and_norm(job))
        if number == 0:
            job.accelerator.save_state(folder)
        else:
            job.accelerator.load_state(folder, strict=False)  # frozen weights may lose digits
            found.append(_scale_and_norm(job))
        job.accelerator.end_training()
    return found


def _scale_and_norm(job: Job) -> tuple[float, float]:
    x = torch.ones(4, 7).to(next(job.module.parameters()).dtype)
    job.accelerator.backward(job.model(x).float().square().mean())
    norm = job.accelerator.clip_grad_norm_(job.model.parameters(), 1000.0)
    job.optimizer.zero_grad()
    return float(job.model.optimizer.loss_scale), float(norm)

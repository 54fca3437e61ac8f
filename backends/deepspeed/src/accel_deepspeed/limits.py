"""Settings, models and optimizers that DeepSpeed's engine cannot take."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import torch
from torch import nn

from accel_core import has_state
from accel_deepspeed import experts, settings
from accel_deepspeed.optimizer_shards import shape_of
from accel_deepspeed.optimizers import unserved

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from accel_core import Run
    from accel_deepspeed.config import DeepSpeedPlugin

__all__ = ["refused_model", "refused_optimizers", "refused_settings"]

_OFF: Final = (None, False, 0, 1)
_NOT_SERVED: Final = {
    "tensor_parallel.autotp_size": "ranks would have to read the same batches; leave it out",
    "expert_parallel.enabled": "it replaces parameters under the optimizer; use deepspeed.moe.layer.MoE",
    "managed_gradient_accumulation": "micro-batches are counted by the run; leave it out",
    "elasticity.enabled": "batches are those of your loaders; leave it out",
    "autotuning.enabled": "it starts the script by itself; tune first, then train with what it found",
    "compression_training": "not shown to work; leave it out",
}
"""Paths of DeepSpeed's JSON that cannot be served -> the reason, and the remedy."""


def refused_settings(config: DeepSpeedPlugin, run: Run) -> Iterator[str]:
    """Reasons against the config on the run's device, each with its remedy."""
    made = config.deepspeed_config
    for path, reason in _NOT_SERVED.items():
        if (value := settings.get(made, path)) not in _OFF:
            yield f"{path} is {value}: {reason}"
    offload = settings.get(made, "zero_optimization.offload_optimizer.device", "none")
    is_lazy = run.stack.device.name == "hpu" and os.environ.get("PT_HPU_LAZY_MODE", "1") != "0"
    if is_lazy and offload not in ("none", settings.AUTO):
        yield f"offload_optimizer_device is {offload}, which Gaudi's lazy mode cannot\nset hpu.lazy: false"


def refused_optimizers(
    optimizers: Sequence[Optimizer], device: torch.device, stage: int, *, flat: bool
) -> Iterator[str]:
    """Yield reasons against optimizers in this ZeRO stage. flat: parameters are laid end to end."""
    for optimizer in optimizers:
        if reason := unserved(optimizer, device, flat=flat):
            yield reason
        if any(not group["params"] and "initial_lr" in group for group in optimizer.param_groups):
            yield (
                f"the {type(optimizer).__name__} has a group without parameters and a scheduler: DeepSpeed"
                " removes such groups, and the scheduler would fail at its first step\n"
                "make the optimizer without empty groups"
            )
        for number, group in enumerate(optimizer.param_groups if stage in (1, 2) else ()):
            if group["params"] and not any(parameter.requires_grad for parameter in group["params"]):
                yield (
                    f"all parameters of group {number} of the {type(optimizer).__name__} are frozen, and ZeRO"
                    f" stage {stage} lays the trained ones of each group end to end\n"
                    "make the optimizer without that group, or set zero_stage to 0 or 3"
                )
        if has_state(optimizer):
            yield (
                f"the {type(optimizer).__name__} has state already, and DeepSpeed's engine begins with none\n"
                "prepare it before its first step, and bring its state back with accelerator.load_state"
            )


def refused_model(model: nn.Module, stage: int, *, is_half: bool) -> Iterator[str]:
    """Reasons against a model, in this ZeRO stage. is_half: it computes in 16 bits."""
    if stage == 0 and any(True for _ in experts.spread(model)):
        yield (
            "in ZeRO stage 0 DeepSpeed clips by each rank's own experts (ep_size above 1)\n"
            "set zero_stage to 1 or 2"
        )
    for name, module in model.named_modules():
        is_sparse = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        if stage > 0 and is_sparse and any(p.requires_grad for p in module.parameters()):
            yield (
                f"{name or type(module).__name__}: ZeRO takes no sparse gradients (sparse=True)\n"
                "make the module without sparse=True, set zero_stage to 0, or use strategy ddp"
            )
    alike: dict[tuple[str, str], list[str]] = {}
    for name, reason, remedy in _refused_tensors(model, stage, is_half=is_half):
        alike.setdefault((reason, remedy), []).append(name)
    for (reason, remedy), names in alike.items():
        more = f" ({len(names) - 1} more like it)" if names[1:] else ""
        yield f"{names[0]} {reason}{more}\n{remedy}"


def _refused_tensors(model: nn.Module, stage: int, *, is_half: bool) -> Iterator[tuple[str, str, str]]:
    """(name, reason, remedy) of each tensor that the engine cannot take."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            yield (
                name,
                "is on the meta device and has no values",
                "fill it by model.to_empty(device=...) and its weights; or build it in model_init_context()",
            )
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0:
            yield (
                name,
                "has no dimension, which DeepSpeed cannot broadcast",
                "give it the shape (1,): nn.Parameter(torch.ones(1))",
            )
        if 0 in shape_of(parameter) and stage > 0:
            yield (
                name,
                "has no elements, and ZeRO forgets such parameters",
                "leave it out of the model, set zero_stage to 0, or use strategy ddp",
            )
        if parameter.dtype is torch.float64 and parameter.requires_grad and not is_half:
            yield (
                name,
                "is float64, and DeepSpeed steps in float32",
                "make it float32, or use strategy ddp",
            )
        if parameter.is_complex() and parameter.requires_grad:
            yield (
                name,
                f"is {parameter.dtype}, and DeepSpeed's optimizers step complex numbers wrongly",
                "make it two real ones, or use strategy ddp",
            )

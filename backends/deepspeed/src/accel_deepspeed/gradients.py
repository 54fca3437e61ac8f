"""An engine's gradients at the boundary of a window.

Reduced, measured, clipped, dropped.

One class a ZeRO stage, because each keeps them elsewhere. DeepSpeed would do it all inside `step`;
here reducing is a step of its own, so that the norm is known when `clip_grad_norm_` returns.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.utils._pytree import tree_leaves

from accel_core import AccelError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Gradients", "count_backward_once", "of"]

_ALMOST_ZERO: Final = 1e-30
"""A norm in place of 0, which DeepSpeed takes for no clipping."""


def of(engine: Any, max_norm: float, fixed: bool) -> Gradients:
    """Return the gradients of an engine, by its stage.

    Args:
        engine: DeepSpeed's.
        max_norm: What each step clips to; 0: nothing.
        fixed: `clip_grad_norm_` cannot ask for another norm.
    """
    stage = engine.zero_optimization_stage()
    kind = Gradients if stage == 0 else WholeWeights if stage < 3 else Sharded
    if type(engine.optimizer).__name__ == "BF16_Optimizer":
        kind = Masters
    return kind(engine, max_norm, fixed)


def count_backward_once(engine: Any) -> None:
    """Have a backward that begins at several outputs of the engine count as one.

    As it does in two forwards of a discriminator: DeepSpeed counts each output, and waits for the end of the
    others. `torch.autograd.grad` counts as none, nor does a backward through a model that is frozen now.
    """
    engine._support_torch_style_backward = True  # in stage 0 too: it has nothing to do there
    optimizer = engine.optimizer
    if not _is_zero(optimizer):
        if engine.zero_optimization_partition_weights():  # a backward calls it, and inference has none
            optimizer.set_gradient_accumulation_boundary = bool
        return

    def begin(gradient: Tensor) -> None:
        counts = torch.autograd._is_checkpoint_valid() and any(p.requires_grad for p in engine.parameters())
        while optimizer._backward_active_depth > counts:
            optimizer.exit_backward()
        if not optimizer._backward_active_depth:
            optimizer.clear_backward_seen_flag()  # maybe of another backward since the last forward
        if optimizer._backward_active_depth < counts:
            optimizer.enter_backward()
            optimizer.queue_post_backward_callback()

    def watch(module: object, inputs: object, outputs: Any) -> None:
        for each in tree_leaves(outputs):
            if isinstance(each, torch.Tensor) and each.grad_fn is not None:
                each.register_hook(begin)

    engine.register_forward_hook(watch)  # its own hooks come before


def _is_zero(optimizer: Any) -> bool:
    """Return whether DeepSpeed follows each backward, as all but stage 0 do."""
    return hasattr(optimizer, "queue_post_backward_callback")


class Gradients:
    """Stage 0: whole gradients on each rank, in the parameters."""

    _asked: float | None = None
    """Norm to which `clip_grad_norm_` has the coming step clip."""

    def __init__(self, engine: Any, max_norm: float, fixed: bool) -> None:
        self.configured, self.fixed = max_norm, fixed
        self.engine, self.optimizer = engine, engine.optimizer
        engine.set_gradient_accumulation_boundary(False)
        self._clear = engine.zero_grad
        if _is_zero(self.optimizer):
            engine.zero_grad = self._zero_grad  # its own leaves what is reduced

    @property
    def scale(self) -> float:
        """By which the loss, and so the gradients, are multiplied."""
        # One of its optimizers says None where it does not scale.
        return float(getattr(self.optimizer, "loss_scale", None) or 1.0)

    def reduce(self) -> None:
        """Average over the ranks; once a window, in its last micro-batch. Collective."""
        self.engine.set_gradient_accumulation_boundary(True)
        self.engine.allreduce_gradients()

    def clip(self, max_norm: float) -> Tensor:
        """Have the coming step clip to this norm; return the norm now. Collective.

        inf: clip no more than was asked for before.
        """
        if math.isfinite(max_norm):
            self._asked = min(max(max_norm, _ALMOST_ZERO), math.inf if self._asked is None else self._asked)
        return self.norm()

    def tensors(self) -> list[Tensor]:
        """Return this rank's reduced gradients, times the scale."""
        return [p.grad for p in self.engine.module.parameters() if p.grad is not None]

    def clamp(self, value: float) -> None:
        """Clamp each to [-value, value]."""
        limit = value * self.scale
        for tensor in self._settled():
            tensor.clamp_(-limit, limit)

    def _settled(self) -> list[Tensor]:
        """`tensors`, to be changed.

        Offloaded ones are copied beside the host, so they are waited for.
        """
        listed: list[Tensor | None] = [*self.tensors()]
        found = [tensor for tensor in listed if tensor is not None]  # None: nothing has come in yet
        if any(tensor.device.type == "cpu" for tensor in found):
            from deepspeed.accelerator import get_accelerator

            get_accelerator().synchronize()
        return found

    def norm(self) -> Tensor:
        """Of all ranks' together (0-dim). Collective."""
        return get_total_norm(self.tensors()) / self.scale

    def step(self) -> bool:
        """Clip as was asked, and have the engine step; whether it did. Collective."""
        max_norm = self.configured if self._asked is None else self._asked
        if hasattr(self.optimizer, "clip_grad"):
            self.optimizer.clip_grad = max_norm
        elif max_norm:
            clip_grad_norm_(self.engine.module.parameters(), max_norm)
        self.engine.step()
        self._end()
        return bool(self.engine.was_step_applied())

    def drop(self) -> None:
        """Forget gradients that are not to be applied."""
        self._clear()
        self._end()

    def _end(self) -> None:
        self._asked = None
        self.engine.set_gradient_accumulation_boundary(False)

    def _zero_grad(self, set_to_none: bool = True) -> None:
        self.drop()
        self._clear()


class Masters(Gradients):
    """Stages 0 and 1 with bfloat16 weights, where they are summed in float32.

    Whole, in the optimizer.
    """

    def tensors(self) -> list[Tensor]:
        return list(self.optimizer.fp32_groups_gradients_flat)

    def drop(self) -> None:
        self.optimizer.zero_grad()
        self._end()


class WholeWeights(Gradients):
    """Stages 1 and 2: this rank's share of each group, in the optimizer."""

    _has_new = False
    """True after a backward, until its gradients are reduced."""
    _is_reduced = False
    """True after a reduction, until a step or clearing."""

    def __init__(self, engine: Any, max_norm: float, fixed: bool) -> None:
        super().__init__(engine, max_norm, fixed)
        self.optimizer.register_grad_acc_post_hook(self._note_backward)

    def _note_backward(self) -> None:
        self._has_new = True

    def reduce(self) -> None:
        if self._is_reduced and not self._has_new:
            return
        if self._is_reduced or not self._has_new:
            cause = "after clipping or unscaling came another" if self._is_reduced else "there was no"
            raise AccelError(
                f"DeepSpeed: {cause} backward through the model that prepare returned, and its engine would"
                " step by other gradients, or none\n"
                "call backward of what that model has computed, then clip, then step"
            )
        self._reduce()
        self._is_reduced, self._has_new = True, False

    def _reduce(self) -> None:
        if self.engine.zero_optimization_stage() > 1:  # its ranks reduce in each backward
            self.optimizer.finalize_gradient_accumulation_boundary()
            self.engine.set_gradient_accumulation_boundary(True)
            return
        # Other ranks may have gradients of what this one did not use.
        for parameter in (p for group in self.optimizer.bit16_groups for p in group if p.requires_grad):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        super().reduce()

    def tensors(self) -> list[Tensor]:
        if self.optimizer.cpu_offload:
            return [group.grad for group in self.optimizer.single_partition_of_fp32_groups]
        return [tensor for group in self.optimizer.averaged_gradients.values() for tensor in group or ()]

    def norm(self) -> Tensor:
        norm: Tensor = self.optimizer.scaled_global_norm() / self.scale
        return norm

    def _end(self) -> None:
        super()._end()
        self._has_new = self._is_reduced = False

    def drop(self) -> None:
        optimizer = self.optimizer
        optimizer.zero_grad()
        if optimizer.cpu_offload:
            optimizer.reset_cpu_buffers()
            optimizer.micro_step_id = -1  # as before a first backward, else the next one adds to these
            optimizer._offload_accumulated_param_ids = set()
            self._clear_offloaded()
        for held in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
            held.update(dict.fromkeys(held))
        self._end()

    def _clear_offloaded(self) -> None:
        """Clear gradients that a window did not write.

        DeepSpeed would step their parameters by older ones.
        """
        for tensor in self._settled():
            tensor.zero_()


class Sharded(WholeWeights):
    """Stage 3: this rank's share of each parameter."""

    def tensors(self) -> list[Tensor]:
        if self.optimizer.offload_optimizer:
            return [group.grad for group in self.optimizer.fp32_partitioned_groups_flat]
        return [tensor for group in self.optimizer.averaged_gradients.values() for tensor in group]

    def norm(self) -> Tensor:
        from deepspeed.runtime.zero.stage3 import combine_grad_norm_groups

        norm: Tensor = combine_grad_norm_groups(self.optimizer._get_norm_groups()) / self.scale
        return norm

    def drop(self) -> None:
        self.optimizer.zero_grad()
        self.optimizer.grad_partitions_flat_buffer.zero_()  # else applied again to what is not used next
        if self.optimizer.offload_optimizer:
            self._clear_offloaded()
        self._end()

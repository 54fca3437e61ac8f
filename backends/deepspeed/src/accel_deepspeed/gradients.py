"""An engine's gradients at the boundary of a window: reduced, measured, clipped, dropped.

Each ZeRO stage keeps gradients in another place, so there is one class per place. DeepSpeed reduces, clips
and steps in one call of `engine.step`. Here the reduction is a call of its own, so that `clip_grad_norm_` can
return the norm before the step.
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
"""The norm to clip to in place of 0: DeepSpeed clips nothing if `clip_grad` is 0."""


def of(engine: Any, max_norm: float, fixed: bool) -> Gradients:
    """Return the gradients of an engine, by its stage.

    Args:
        engine: DeepSpeed's engine.
        max_norm: the norm that each step clips to; 0: no clipping.
        fixed: `clip_grad_norm_` cannot ask for another norm.
    """
    stage = engine.zero_optimization_stage()
    kind = Gradients if stage == 0 else WholeWeights if stage < 3 else Sharded
    # The engine takes this optimizer in stages 0 and 1, so the stage alone does not tell the place.
    if type(engine.optimizer).__name__ == "BF16_Optimizer":
        kind = Masters
    return kind(engine, max_norm, fixed)


def count_backward_once(engine: Any) -> None:
    """Make a backward that begins at several outputs of the engine count as one.

    Two forwards of a discriminator have such a backward. DeepSpeed counts a backward per output, and waits
    for the end of each: gradients of stage 2 are missing in the step. `torch.autograd.grad`, and a backward
    through a model that is frozen now, must not count at all, because they leave no gradients to reduce.
    """
    # The user calls loss.backward, never engine.backward. Without this flag DeepSpeed refuses it; stage 0, in
    # which DeepSpeed leaves the flag False, needs nothing else.
    engine._support_torch_style_backward = True
    optimizer = engine.optimizer
    if not _is_zero(optimizer):
        # An engine for inference in stage 3 has an offload object in place of an optimizer. Its hooks call
        # this method in a backward through the frozen model, and the object lacks it: any callable will do.
        if engine.zero_optimization_partition_weights():
            optimizer.set_gradient_accumulation_boundary = bool
        return

    def begin(gradient: Tensor) -> None:
        # torch has no public test for "inside backward(), not grad()". Checkpointing needs the same test:
        # reentrant checkpoints are invalid inside autograd.grad.
        counts = torch.autograd._is_checkpoint_valid() and any(p.requires_grad for p in engine.parameters())
        # DeepSpeed's own hook has raised the depth already, once per output: bring it to 1, or to 0 for a
        # call that does not count.
        while optimizer._backward_active_depth > counts:
            optimizer.exit_backward()
        # A flag of an earlier backward since the last forward would end this one at its first gradient.
        if not optimizer._backward_active_depth:
            optimizer.clear_backward_seen_flag()
        if optimizer._backward_active_depth < counts:
            optimizer.enter_backward()
            optimizer.queue_post_backward_callback()

    def watch(module: object, inputs: object, outputs: Any) -> None:
        for each in tree_leaves(outputs):
            if isinstance(each, torch.Tensor) and each.grad_fn is not None:
                each.register_hook(begin)

    # After DeepSpeed's hooks, which the engine has registered in its constructor: `begin` corrects their
    # count.
    engine.register_forward_hook(watch)


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
            # DeepSpeed's zero_grad clears `.grad` alone, and the next step would apply reduced gradients.
            engine.zero_grad = self._zero_grad

    @property
    def scale(self) -> float:
        """The factor of the loss, and so of the gradients, until the step divides by it."""
        # Optimizers that do not scale have no such attribute, or None.
        return float(getattr(self.optimizer, "loss_scale", None) or 1.0)

    def reduce(self) -> None:
        """Average over the ranks, once per window, in the last micro-batch. Collective."""
        # allreduce_gradients does nothing before the boundary, so it is set here, and taken back in `_end`.
        self.engine.set_gradient_accumulation_boundary(True)
        self.engine.allreduce_gradients()

    def clip(self, max_norm: float) -> Tensor:
        """Make the coming step clip to this norm; return the norm before. Collective.

        inf: only measure, and keep the norm of an earlier call.
        """
        # The step clips, because the gradients of a ZeRO stage are in buffers of DeepSpeed's. Several calls
        # in a window clip to the smallest norm, as they would in plain PyTorch.
        if math.isfinite(max_norm):
            self._asked = min(max(max_norm, _ALMOST_ZERO), math.inf if self._asked is None else self._asked)
        return self.norm()

    def tensors(self) -> list[Tensor]:
        """Return this rank's reduced gradients, times the scale."""
        return [p.grad for p in self.engine.module.parameters() if p.grad is not None]

    def clamp(self, value: float) -> None:
        """Clamp each gradient to [-value, value], in units of the loss before scaling."""
        limit = value * self.scale
        for tensor in self._settled():
            tensor.clamp_(-limit, limit)

    def _settled(self) -> list[Tensor]:
        """Return `tensors`, ready to be changed in place.

        DeepSpeed copies offloaded gradients to the CPU asynchronously, so this method waits for the copies.
        """
        listed: list[Tensor | None] = [*self.tensors()]
        found = [tensor for tensor in listed if tensor is not None]  # None: nothing has come in yet
        if any(tensor.device.type == "cpu" for tensor in found):
            from deepspeed.accelerator import get_accelerator

            get_accelerator().synchronize()
        return found

    def norm(self) -> Tensor:
        """Return the norm of the gradients of all ranks, without the scale (0-dim). Collective."""
        return get_total_norm(self.tensors()) / self.scale

    def step(self) -> bool:
        """Clip, and make the engine step; return False for a step skipped after an overflow. Collective."""
        max_norm = self.configured if self._asked is None else self._asked
        # DeepSpeed's optimizers clip by an attribute, which the user's own optimizer (stage 0, float32)
        # lacks.
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
    """Stages 0 and 1 with bfloat16 weights: whole gradients, which the optimizer sums in float32."""

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
        # A clip has reduced already, and the step asks once more.
        if self._is_reduced and not self._has_new:
            return
        # A second reduction would mix reduced and new gradients. Without a backward the step would use the
        # buffers of the window before, or none.
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
        # Stage 2 reduces bucket by bucket during backward; only the last bucket is open now.
        if self.engine.zero_optimization_stage() > 1:
            self.optimizer.finalize_gradient_accumulation_boundary()
            self.engine.set_gradient_accumulation_boundary(True)
            return
        # Ranks reduce the same buckets only if all have the same gradients: parameters that this rank did not
        # use, and another rank did, need zeros.
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
            # Back to the state before a first backward; otherwise the next backward adds to these gradients.
            optimizer.reset_cpu_buffers()
            optimizer.micro_step_id = -1
            optimizer._offload_accumulated_param_ids = set()
            self._clear_offloaded()
        # zero_grad above clears `.grad` of parameters; these dictionaries hold the reduced shares.
        for held in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
            held.update(dict.fromkeys(held))
        self._end()

    def _clear_offloaded(self) -> None:
        """Zero the CPU copies of gradients.

        A parameter that the next window does not use keeps its copy, and DeepSpeed would step by it again.
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
        # Parameters that the next window does not use would be stepped by the old contents again.
        self.optimizer.grad_partitions_flat_buffer.zero_()
        if self.optimizer.offload_optimizer:
            self._clear_offloaded()
        self._end()

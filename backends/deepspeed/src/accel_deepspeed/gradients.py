"""An engine's gradients at the boundary of a window.

Reduced, measured, scaled, clipped, dropped.

One class a ZeRO stage, because each keeps them elsewhere. DeepSpeed would do it all inside `step`;
here reducing is a step of its own, so that the norm is known when `clip_grad_norm_` returns.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.utils import clip_grad_norm_, get_total_norm

from accel_core import AccelError
from accel_deepspeed.weights import is_held

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor, nn

    from accel_core import Collectives, Unit

__all__ = ["Gradients", "enter_once", "of", "refuse_others_unused"]

_OVERWRITTEN: Final = (
    "DeepSpeed: backward came after clipping or unscaling, before optimizer.step(), and the engine overwrites"
    " offloaded gradients\nclip or unscale once, just before optimizer.step()"
)


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


def enter_once(engine: Any, trained: Sequence[nn.Parameter]) -> None:
    """Make a backward from several outputs of the engine count once.

    `torch.autograd.grad` is none, nor is a backward with all of `trained` frozen.

    DeepSpeed takes each output for a backward of its own, and waits for the end of the others.
    Any other is one, even if it seems to reach no weight: reentrant checkpoints go backward inside it.
    """
    enter = engine._backward_prologue
    engine._support_torch_style_backward = True  # in stage 0 too: there is nothing that it would have to do

    def once() -> None:
        if getattr(engine.optimizer, "_backward_active_depth", 0):
            return
        is_whole = torch.autograd._is_checkpoint_valid()  # else it is of some inputs alone
        if any(is_whole or _is_reached(weight) for weight in trained if weight.requires_grad):
            _refuse_unscaled(engine)
            enter()
        elif torch.is_grad_enabled():  # create_graph: another backward goes through this one
            _refuse_partitioned(engine.module)

    engine._backward_prologue = once


def _is_reached(parameter: nn.Parameter) -> bool:
    """Return True if the backward that runs now adds to the parameter's gradient.

    torch raises an error if `torch.autograd.grad` asks for it. `torch.func` reaches none.
    """
    from deepspeed.runtime.utils import count_used_parameters_in_backward
    from deepspeed.utils.torch import is_functorch_transforming

    if is_functorch_transforming():
        return False
    try:
        used: int = count_used_parameters_in_backward([parameter])
    except RuntimeError:
        return False
    return used > 0


def _refuse_unscaled(engine: Any) -> None:
    """Refuse a backward of another engine, or of none, under fp16.

    Its loss scale is not this engine's. Raises AccelError.
    """
    needs_scaler = getattr(engine.optimizer, "needs_scaler", bool)
    if needs_scaler() and not (engine._running_engine_backward or engine._manual_backward_expected):
        raise AccelError(
            f"DeepSpeed: under fp16 a backward of another model's loss, or the loss's own, reaches weights of"
            f" the {type(engine.module).__name__}, and its gradients have another loss scale, or none\n"
            "call accelerator.backward(loss, model=...) with the trained model, and freeze each other model"
            " that the loss passes through: other.requires_grad_(False)"
        )


def _refuse_partitioned(model: nn.Module) -> None:
    """Refuse a graph of gradients, in stage 3.

    Its weights are let go of, and a second backward would find them empty. Raises AccelError.
    """
    if any(hasattr(p, "ds_tensor") and not is_held(p) for p in model.parameters()):
        raise AccelError(
            "DeepSpeed: torch.autograd.grad(create_graph=True) in ZeRO's stage 3: layers let go of weights"
            " that a second backward needs\n"
            "call forward, grad and backward inside accelerator.full_parameters(model), or set zero_stage to"
            " 0, 1 or 2"
        )


def refuse_others_unused(engine: Any, control: Collectives) -> None:
    """Raise at the end of a backward in which ranks used different parameters.

    For stages 2 and 3.

    DeepSpeed reduces what each rank used, side by side in one buffer: it adds gradients of different
    parameters where their sizes are equal, and aborts the process elsewhere. The ranks compare at the end
    of a backward, before its last bucket.
    """
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    optimizer, used = engine.optimizer, set[int]()
    reduce_one = optimizer.reduce_independent_p_g_buckets_and_remove_grads
    reduce_rest = optimizer.overlapping_partition_gradients_reduce_epilogue

    def note(parameter: nn.Parameter, *group: int) -> None:
        used.add(id(parameter))
        reduce_one(parameter, *group)

    def compare() -> None:
        ranks = control.all_reduce(torch.tensor([key in used for key in names], dtype=torch.int32), "sum")
        used.clear()
        some = [
            name
            for name, count in zip(names.values(), ranks.tolist(), strict=True)
            if 0 < count < control.size
        ]
        if some:
            raise AccelError(
                f"backward used {', '.join(some[:8])} on some ranks only ({len(some)} in all),"
                " and ZeRO's stages 2 and 3 add gradients of different parameters\n"
                "use the same parameters on all ranks, or set zero_stage to 0 or 1"
            )
        reduce_rest()

    optimizer.reduce_independent_p_g_buckets_and_remove_grads = note
    optimizer.overlapping_partition_gradients_reduce_epilogue = compare


class Gradients:
    """Stage 0: whole gradients on each rank, in the parameters."""

    _is_reduced = False
    """True between a reduction and the next backward, step or clearing."""
    _is_edited = False
    """True if gradients were changed since they were reduced."""
    _asked: float | None = None
    """Norm to which `clip_grad_norm_` has the coming step clip.

    0: no more, as they are clipped already.
    """
    _steps_copies = False
    """True if a step is of copies, laid out when the engine was made."""
    _groups: str | None = None
    """Attribute of DeepSpeed's optimizer with the parameters that it steps.

    None: it takes the gradients of all of the model's.
    """

    def __init__(self, engine: Any, max_norm: float, fixed: bool) -> None:
        self.configured = max_norm
        self.fixed = fixed
        self.engine, self.optimizer = engine, engine.optimizer
        named = dict(engine.module.named_parameters())
        groups = [named.values()] if self._groups is None else getattr(self.optimizer, self._groups)
        taken = {id(parameter) for group in groups for parameter in group}
        self._training = {name: p for name, p in named.items() if p.requires_grad and id(p) in taken}
        self._others = {name: p for name, p in named.items() if p.requires_grad and id(p) not in taken}
        """Parameters that no optimizer steps."""
        self._frozen = {name: p for name, p in named.items() if not p.requires_grad}
        self.trained = frozenset(map(id, self._training.values()))
        self._grouped = self._in_groups()
        self._reduce = self._take_over()
        # Programs ask the engine for the norm. The engine itself clips nothing: `clip` does.
        engine.gradient_clipping, engine.clip_fp32_gradients = lambda: max_norm, lambda: None
        self._enter, self._clear = engine._backward_prologue, engine.zero_grad
        engine._backward_prologue = self._begin
        engine.zero_grad = self._zero_grad  # its own leaves what is reduced

    def _take_over(self) -> Any:
        # Else `step` would reduce a second time.
        self.engine.enable_backward_allreduce = False
        return self.engine.allreduce_gradients

    @property
    def scale(self) -> float:
        """By which the loss, and so the gradients, are multiplied."""
        # One of its optimizers says None where it does not scale.
        return float(getattr(self.optimizer, "loss_scale", None) or 1.0)

    @property
    def has_any(self) -> bool:
        """True if a backward of this rank has left gradients, not yet reduced."""
        return any(p.grad is not None for p in self._training.values())

    def refuse_part(self, unit: Unit, parameters: Sequence[nn.Parameter]) -> None:
        """Raise AccelError for a clip of a part of what is trained: all would be."""
        if not self.trained <= {id(parameter) for parameter in parameters}:
            raise AccelError(
                f"DeepSpeed clips a unit's parameters together, and {unit.name!r} has more than were given\n"
                "pass model.parameters()"
            )

    def refuse_others(self, parameters: Sequence[nn.Parameter]) -> None:
        """Refuse to clip these together with gradients that DeepSpeed does not take.

        Its norm is without them. Raises AccelError.
        """
        given = set(map(id, parameters))
        others = [name for name, p in self._others.items() if p.grad is not None and id(p) in given]
        if others:
            raise AccelError(
                f"DeepSpeed clips what its optimizer steps, and no optimizer has {others[0]}"
                f" ({len(others)} such parameter(s)), whose gradient would count in the norm\n"
                "freeze such parameters before prepare, or pass those that the optimizer was made with"
            )

    def reduce(self) -> None:
        """Average over the ranks; once a window, in its last micro-batch. Collective."""
        if self.trained and not self.has_any:
            raise AccelError(
                "DeepSpeed: no gradient since the last optimizer.step() or zero_grad(), and its engine steps"
                " by zeros then, which moves weights by their moments and decay, or fails\n"
                "call backward, but not in a closure, before clip_grad_norm_ and step, or leave these out"
            )
        if self._steps_copies:
            self._refuse_regrouped()
        self.engine._running_engine_step = True  # says to DeepSpeed: this is the boundary
        self._reduce()
        self.engine._running_engine_step = False
        self._is_reduced, self._is_edited, self._asked = True, False, None

    def _begin(self) -> None:
        """Begin a backward, which may add to gradients that are reduced."""
        if self._is_reduced:
            self._settle()
            self._keep()
            self._is_reduced = False
        self._enter()

    def _keep(self) -> None:
        """Keep reduced gradients through a backward: here it adds to them."""

    def _settle(self) -> None:
        """Clip now what the step was to clip."""
        if self._asked:
            self._clip_now(self._asked, self.norm())

    def _clip_now(self, max_norm: float, norm: Tensor) -> None:
        if norm.isfinite():
            self.multiply((max_norm / (norm + 1e-6)).clamp(max=1.0))
        self._asked = 0.0

    def ask(self, max_norm: float) -> Tensor:
        """Have the coming step clip to this norm; return the norm now. Collective.

        inf: clip no more than was asked for before.
        """
        self._settle()
        norm = self.norm()
        if max_norm <= 0:  # which DeepSpeed takes for no norm at all
            self._clip_now(max_norm, norm)
        elif math.isfinite(max_norm):
            self._asked = max_norm
        return norm

    def tensors(self) -> list[Tensor]:
        """Return this rank's reduced gradients, times the scale."""
        return [p.grad for p in self.engine.module.parameters() if p.grad is not None]

    def multiply(self, factor: Tensor) -> None:
        """Multiply all of them."""
        self._is_edited = True
        for device, tensors in self._by_device().items():
            torch._foreach_mul_(tensors, factor.to(device))
        norms = getattr(self.optimizer, "norm_for_param_grads", None)
        if norms:  # of offloaded gradients, taken when they came in
            self.optimizer.norm_for_param_grads = {key: norm * factor for key, norm in norms.items()}

    def clamp(self, value: float) -> None:
        """Clamp each to [-value, value]."""
        self._settle()
        self._is_edited = True
        limit = value * self.scale
        for tensors in self._by_device().values():
            torch._foreach_clamp_max_(tensors, limit)
            torch._foreach_clamp_min_(tensors, -limit)

    def _by_device(self) -> dict[torch.device, list[Tensor]]:
        """`tensors`, to be changed.

        Offloaded ones are copied beside the host, so they are waited for.
        """
        found: dict[torch.device, list[Tensor]] = {}
        for tensor in self.tensors():
            if tensor is not None:  # offloaded, and nothing has come in yet
                found.setdefault(tensor.device, []).append(tensor)
        if any(device.type == "cpu" for device in found):
            from deepspeed.accelerator import get_accelerator

            get_accelerator().synchronize()
        return found

    def norm(self) -> Tensor:
        """Of all ranks' together (0-dim). Collective."""
        return get_total_norm(self.tensors()) / self.scale

    def step(self) -> bool:
        """Clip as was asked, and have the engine step; whether it did. Collective."""
        self._refuse_unfrozen()
        if self._steps_copies:
            self._refuse_frozen()
            self._refuse_regrouped()
        if not self._is_reduced:  # the model's own `zero_grad` came after
            self.reduce()
        self._refuse_given()
        self.clip(self.configured if self._asked is None else self._asked)
        with _scale_kept(self.optimizer):
            self.engine.step()
        self._is_reduced, self._asked = False, None
        self._grouped = self._in_groups()
        return bool(self.engine.was_step_applied())

    def _in_groups(self) -> list[list[Tensor]]:
        return [[*group["params"]] for group in getattr(self.optimizer, "param_groups", ())]

    def _refuse_regrouped(self) -> None:
        now = self._in_groups()
        if [[*map(id, each)] for each in now] != [[*map(id, each)] for each in self._grouped]:
            raise AccelError(
                "DeepSpeed: the parameters of the optimizer's groups were changed after prepare, and its"
                " engine steps those of before\n"
                "group parameters before prepare, or call accelerator.free_memory() and prepare again"
            )

    def _refuse_given(self) -> None:
        """Refuse gradients in parameters, where they are not those of a step."""

    def _refuse_unfrozen(self) -> None:
        late = [name for name, parameter in self._frozen.items() if parameter.requires_grad]
        if late:
            raise AccelError(
                f"DeepSpeed: {len(late)} parameter(s) were frozen when the model was prepared and train now"
                f" ({late[0]}): its engine does not step them\n"
                "unfreeze before prepare, or call accelerator.free_memory() and prepare the model again"
            )

    def _refuse_frozen(self) -> None:
        late = [name for name, parameter in self._training.items() if not parameter.requires_grad]
        if late:
            raise AccelError(
                f"DeepSpeed: {len(late)} parameter(s) were trained when the model was prepared and are frozen"
                f" now ({late[0]}): its engine still moves them by their moments and decay\n"
                "freeze before prepare, or call accelerator.free_memory() and prepare the model again"
            )

    def clip(self, max_norm: float) -> None:
        """Have the coming step clip to this norm; 0: not."""
        if hasattr(self.optimizer, "clip_grad"):
            self.optimizer.clip_grad = max_norm
        elif max_norm:
            clip_grad_norm_(self.engine.module.parameters(), max_norm)

    def drop(self) -> None:
        """Forget gradients that are not to be applied."""
        self._is_reduced = False
        self._clear()

    def _zero_grad(self, set_to_none: bool = True) -> None:
        self.drop()
        for parameter in self._others.values():
            parameter.grad = None


class Masters(Gradients):
    """Stages 0 and 1 with bfloat16 weights, where they are summed in float32.

    Whole, in the optimizer.
    """

    _steps_copies, _groups = True, "bf16_groups"

    @property
    def has_any(self) -> bool:
        return super().has_any or any(map(any, self.optimizer.fp32_groups_has_gradients))

    def tensors(self) -> list[Tensor]:
        return list(self.optimizer.fp32_groups_gradients_flat)

    def drop(self) -> None:
        self._is_reduced = False
        self.optimizer.zero_grad()


class WholeWeights(Gradients):
    """Stages 1 and 2: this rank's share of each group, in the optimizer."""

    _steps_copies, _groups = True, "bit16_groups"

    _taken = False
    """True if a backward has brought gradients to stage 2 or 3.

    No step has applied them yet.
    """
    _before: list[Tensor] | None = None
    """Gradients that were reduced before, which DeepSpeed overwrites."""

    def _take_over(self) -> Any:
        if self.engine.zero_optimization_stage() == 1:
            return super()._take_over()
        finalize = self.optimizer.finalize_gradient_accumulation_boundary
        self.optimizer.finalize_gradient_accumulation_boundary = lambda: None
        take = self.optimizer.reduce_independent_p_g_buckets_and_remove_grads

        def note(parameter: nn.Parameter, *group: int) -> None:
            self._taken = True
            self.engine._backward_prologue()  # which no output began, if the loss is made of gradients alone
            take(parameter, *group)

        # What is offloaded is there from the start, and what a rank holds may be padding alone.
        self.optimizer.reduce_independent_p_g_buckets_and_remove_grads = note
        return finalize

    @property
    def has_any(self) -> bool:
        return super().has_any if self.engine.zero_optimization_stage() == 1 else self._taken

    def reduce(self) -> None:
        # Other ranks may have gradients of what this one did not use.
        if self.engine.zero_optimization_stage() == 1 and self.has_any:
            for parameter in self._training.values():
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        super().reduce()
        if self._before:
            for tensor, before in zip(self.tensors(), self._before, strict=True):
                tensor.add_(before)
            self._before = None

    def _keep(self) -> None:
        """Keep gradients that the next reduction overwrites."""
        if self.optimizer.cpu_offload:
            raise AccelError(_OVERWRITTEN)
        self._before = [tensor.clone() for tensor in self.tensors()]

    def tensors(self) -> list[Tensor]:
        if self.optimizer.cpu_offload:
            return [group.grad for group in self.optimizer.single_partition_of_fp32_groups]
        return [tensor for group in self.optimizer.averaged_gradients.values() for tensor in group or ()]

    def _refuse_given(self) -> None:
        given = [name for name, parameter in self._training.items() if parameter.grad is not None]
        if given:
            raise AccelError(
                f"DeepSpeed: {len(given)} parameter(s) have a gradient that its engine does not see"
                f" ({given[0]}): of parameter.grad = tensor after the reduction, or of a second backward of"
                " one forward\n"
                "scale the loss, or add to it, in place of its gradients; call backward once"
            )

    def norm(self) -> Tensor:
        norm: Tensor = self.optimizer.scaled_global_norm() / self.scale
        return norm

    def clip(self, max_norm: float) -> None:
        self.optimizer.clip_grad = max_norm

    def step(self) -> bool:
        applied = super().step()
        self._taken, self._before = False, None
        return applied

    def drop(self) -> None:
        optimizer, self._taken = self.optimizer, False
        self._is_reduced, self._before = False, None
        optimizer.zero_grad()
        if optimizer.cpu_offload:
            optimizer.reset_cpu_buffers()
            optimizer.micro_step_id = -1  # as before a first backward, else the next one adds to these
            optimizer._offload_accumulated_param_ids = set()
            self._clear_offloaded()
        for held in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
            held.update(dict.fromkeys(held))

    def _clear_offloaded(self) -> None:
        """Clear gradients that a window did not write.

        DeepSpeed would step their parameters by older ones.
        """
        for tensors in self._by_device().values():
            torch._foreach_zero_(tensors)


class Sharded(WholeWeights):
    """Stage 3: this rank's share of each parameter."""

    _groups = "fp16_groups"

    def _keep(self) -> None:
        if self.optimizer.offload_optimizer and self._is_edited:
            raise AccelError(_OVERWRITTEN)

    def tensors(self) -> list[Tensor]:
        if self.optimizer.offload_optimizer:
            return [group.grad for group in self.optimizer.fp32_partitioned_groups_flat]
        return [tensor for group in self.optimizer.averaged_gradients.values() for tensor in group]

    def norm(self) -> Tensor:
        from deepspeed.runtime.zero.stage3 import combine_grad_norm_groups

        norm: Tensor = combine_grad_norm_groups(self.optimizer._get_norm_groups()) / self.scale
        return norm

    def drop(self) -> None:
        self._taken = self._is_reduced = False
        self.optimizer.zero_grad()
        self.optimizer.grad_partitions_flat_buffer.zero_()  # else applied again to what is not used next
        if self.optimizer.offload_optimizer:
            self._clear_offloaded()


@contextmanager
def _scale_kept(optimizer: Any) -> Iterator[None]:
    """Keep the scale of a loss until a step has divided by it.

    ZeRO raises it before, and would divide by the scale of the next loss.
    """
    update = getattr(optimizer, "_update_scale", None)
    if update is None:
        yield
        return
    held: list[bool] = []
    optimizer._update_scale = lambda overflows=False: update(True) if overflows else held.append(False)
    try:
        yield
    finally:
        del optimizer._update_scale
    for overflows in held:
        update(overflows)

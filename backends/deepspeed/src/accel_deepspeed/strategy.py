"""The strategy plugin `deepspeed`: an engine a unit; core counts, and says when it steps and clips."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from accel_core import AccelError, hooks, implements, no_op
from accel_deepspeed import completing, gradients
from accel_deepspeed.config import DeepSpeedPlugin
from accel_deepspeed.library import deepspeed_for, quiet
from accel_deepspeed.placeholders import DummyOptim, DummyScheduler

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from accel_core import Run, Unit
    from accel_deepspeed.gradients import Gradients

__all__ = ["DeepSpeed", "make"]


def make(config: DeepSpeedPlugin | None, run: Run) -> DeepSpeed:
    """The plugin. Only where it must be does `backward` go through the engine.

    Elsewhere it is torch's own, and several units may share a loss.
    """
    config = config or DeepSpeedPlugin()
    own = config.stage == 0 or run.config.mixed_precision == "fp16"
    return (EngineBackward if own else DeepSpeed)(config, run)


class DeepSpeed:
    """Stages 1 to 3 without a loss scale."""

    below: Any

    def __init__(self, config: DeepSpeedPlugin, run: Run) -> None:
        self.config = config
        self.run = run
        self.gradients: dict[Unit, Gradients] = {}
        self._clip: dict[Unit, float] = {}

    # -- prepare ---------------------------------------------------------------------------------

    @implements(hooks.kind_of)
    def kind_of(self, object: object) -> Literal["model", "optimizer", "scheduler", "dataloader"] | None:
        if isinstance(object, DummyOptim):
            return "optimizer"
        if isinstance(object, DummyScheduler):
            return "scheduler"
        kind: Literal["model", "optimizer", "scheduler", "dataloader"] | None = self.below.kind_of(object)
        return kind

    @implements(hooks.refuse_unit)
    def refuse_unit(
        self, unit: Unit, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> Sequence[str]:
        reasons = []
        if len(unit.models) + len(models) > 1:
            reasons.append(
                "DeepSpeed's engine has one model, and an optimizer spans several\n"
                "put them in one nn.Module, or give each an optimizer of its own"
            )
        if len(unit.optimizers) + len(optimizers) > 1:
            reasons.append(
                "DeepSpeed's engine has one optimizer, and the model got several\n"
                "give one optimizer several parameter groups"
            )
        return reasons

    @implements(hooks.complete)
    def complete(self, config: DeepSpeedPlugin | None, unit: Unit, loaders: Sequence[Any]) -> DeepSpeedPlugin:
        return DeepSpeedPlugin(
            hf_ds_config=completing.complete(self.config, unit, loaders),
            is_train_batch_min=self.config.is_train_batch_min,
            zero3_init_flag=self.config.zero3_init_flag,
            transformer_moe_cls_names=self.config.transformer_moe_cls_names,
        )

    @implements(hooks.prepare_unit)
    def prepare_unit(self, unit: Unit, loaders: Sequence[Any]) -> None:
        """Collective: weights become rank 0's."""
        deepspeed = deepspeed_for(self.run)
        told = completing.engine_settings(unit.config.deepspeed_config, unit)
        given: dict[str, Any] = {}
        for optimizer in unit.optimizers:
            if isinstance(optimizer, DummyOptim):
                given["model_parameters"] = optimizer.parameters
            else:
                given["optimizer"] = optimizer
        with quiet():
            engine, made, _, _ = deepspeed.initialize(model=unit.models[0], config=told, **given)
        unit.wrapped[:] = [engine]
        if unit.optimizers:
            unit.optimizers[:] = [made]
            self.gradients[unit] = gradients.of(engine)

    @implements(hooks.unwrap_model)
    def unwrap_model(self, unit: Unit, model: nn.Module, keep_compiled: bool) -> nn.Module:
        inner: Any = model.module if model in unit.wrapped else model
        unwrapped: nn.Module = self.below.unwrap_model(unit, inner, keep_compiled)
        return unwrapped

    # -- each step -------------------------------------------------------------------------------

    @implements(hooks.reduce_gradients)
    def reduce_gradients(self, unit: Unit, num_items: Tensor | None) -> None:
        import torch

        held = self.gradients[unit]
        held.reduce()
        if num_items is not None:
            held.multiply(self.run.topology.readers / torch.where(num_items > 0, num_items, 1.0))

    @implements(hooks.clip_grad_norm)
    def clip_grad_norm(
        self, unit: Unit, parameters: Sequence[nn.Parameter], max_norm: float, norm_type: float
    ) -> Tensor:
        held = self.gradients[unit]
        if norm_type != 2:
            raise AccelError(
                f"DeepSpeed clips by the 2-norm, not by norm_type={norm_type}\nleave norm_type at 2"
            )
        if not held.trained <= {id(parameter) for parameter in parameters}:
            raise AccelError(
                f"DeepSpeed clips a unit's parameters together, and {unit.name!r} has more than were given\n"
                "pass model.parameters()"
            )
        self._clip[unit] = max_norm
        return held.norm()

    @implements(hooks.clip_grad_value)
    def clip_grad_value(self, unit: Unit, parameters: Sequence[nn.Parameter], value: float) -> None:
        self.gradients[unit].clamp(value)

    @implements(hooks.optimizer_step)
    def optimizer_step(self, unit: Unit, optimizer: Optimizer, closure: Callable[[], Any] | None) -> bool:
        if closure is not None:
            raise AccelError(
                "optimizer.step(closure) evaluates the loss several times a step; DeepSpeed's engine cannot\n"
                "use an optimizer that needs no closure"
            )
        engine: Any = unit.wrapped[0]
        self.gradients[unit].clip(self._clip.pop(unit, 0.0))
        engine.step()
        return bool(engine.was_step_applied())

    @implements(hooks.zero_grad)
    def zero_grad(self, unit: Unit, optimizer: Optimizer, set_to_none: bool) -> None:
        self.gradients[unit].drop()

    @no_op
    @implements(hooks.unscale)
    def unscale(self, unit: Unit, optimizer: Optimizer) -> None:
        return None  # `step` does it

    @implements(hooks.grad_scaler)
    def grad_scaler(self, unit: Unit) -> None:
        return None


class EngineBackward(DeepSpeed):
    """Stage 0, and any stage with a loss scale: backward goes through the engine."""

    @implements(hooks.backward)
    def backward(self, unit: Unit, loss: Tensor, boundary: bool, options: Mapping[str, Any]) -> None:
        unknown = sorted(set(options) - {"retain_graph"})
        if unknown:
            raise AccelError(
                f"backward({', '.join(unknown)}=...): DeepSpeed's engine takes retain_graph only, in stage 0"
                " and under fp16\nleave them out, or use ZeRO 1 to 3 with bf16 or float32"
            )
        engine: Any = unit.wrapped[0]
        engine.backward(loss, scale_wrt_gas=False, **options)

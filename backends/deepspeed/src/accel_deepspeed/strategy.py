"""The strategy plugin `deepspeed`: an engine a unit.

Core counts, and says when it steps and clips.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

from accel_core import AccelError, ConfigError, hooks, implements, no_op
from accel_deepspeed import auto_values, experts, gradients, settings
from accel_deepspeed.compat import deepspeed_for, dismantle, leave, quiet, without_first_steps
from accel_deepspeed.config import DeepSpeedPlugin
from accel_deepspeed.edits import keep_loaded
from accel_deepspeed.engine_init import sharded_init
from accel_deepspeed.inference import run_without_graph
from accel_deepspeed.limits import refused_model, refused_optimizers, refused_settings
from accel_deepspeed.placeholders import DummyOptim, DummyScheduler, EngineScheduler
from accel_deepspeed.state import EngineState
from accel_deepspeed.ulysses import SharedSequences, require_exchange

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from accel_core import Run, RunConfig, Unit
    from accel_deepspeed.gradients import Gradients

__all__ = ["DeepSpeed", "make", "select"]

SEQUENCE: Final = "sequence_parallel_size"
"""DeepSpeed's own name of `parallelism.sp`, in its JSON."""


def make(config: DeepSpeedPlugin | None, run: Run) -> DeepSpeed:
    """Make the plugin, of the class that the precision needs.

    Without a loss scale, `backward` is torch's own, and units may share a loss.
    """
    kind = EngineBackward if run.config.mixed_precision == "fp16" else DeepSpeed
    return kind(config or DeepSpeedPlugin(), run)


def select(run: Run, name: str) -> None:
    """Make this member of the config's `strategies` the default of `prepare`.

    Raises:
        ConfigError: the run has no strategy of that name.
    """
    if name not in run.stack.strategies:
        known = ", ".join(run.stack.strategies)
        raise ConfigError(f"select({name!r}): this run has the strategies {known}\nadd it under strategies:")
    run.use_strategy(name)


class DeepSpeed(SharedSequences, EngineState):
    """All stages, without a loss scale."""

    below: Any

    def __init__(self, config: DeepSpeedPlugin, run: Run) -> None:
        super().__init__()
        self.config = config
        self.run = run
        self.gradients: dict[Unit, Gradients] = {}
        self._units: set[Unit] = set()
        self.asked = run.config.parallelism.get("sp") or int(config.deepspeed_config.get(SEQUENCE, 1))

    @implements(hooks.refuse)
    def refuse(self, config: RunConfig) -> Sequence[str]:
        own, size = self.config.deepspeed_config.get(SEQUENCE), config.parallelism.get("sp")
        differ = own is not None and size not in (None, own)
        contradiction = f"deepspeed's {SEQUENCE} is {own}, and parallelism.sp is {size}\ngive one of them"
        return [*refused_settings(self.config, self.run), *[contradiction] * differ]

    # -- prepare ---------------------------------------------------------------------------------

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
        is_half = self.run.config.mixed_precision != "no"
        flat = self.config.stage > 0 or is_half
        reasons += refused_optimizers(optimizers, self.run.device, self.config.stage, flat=flat)
        for model in models:
            reasons += refused_model(model, self.config.stage, is_half=is_half)
        return reasons

    @implements(hooks.prepare_unit)
    def prepare_unit(self, unit: Unit, loaders: Sequence[Any]) -> None:
        """Give all ranks the weights of rank 0. Collective.

        A late optimizer has the engine built anew, in its place.
        """
        unit.use_config(
            DeepSpeedPlugin(
                hf_ds_config=auto_values.complete(self.config, unit, loaders),
                is_train_batch_min=self.config.is_train_batch_min,
                zero3_init_flag=self.config.zero3_init_flag,
                transformer_moe_cls_names=self.config.transformer_moe_cls_names,
            )
        )
        new = unit not in self._units
        try:
            engine = self._engine(unit)
        except BaseException:  # of any kind: it goes on
            if new and unit in self._units:
                self.release(unit)
            raise
        unit.set_forward_is_collective(engine.zero_optimization_partition_weights())
        unit.set_weights_are_whole(not engine.zero_optimization_partition_weights())
        if unit.wrapped:
            # The user holds the engine of an earlier `prepare`: it becomes the new one.
            held: Any = unit.wrapped[0]
            held.__dict__ = engine.__dict__
        else:
            unit.wrapped.append(engine)
        if unit.optimizers:
            unit.optimizers[:] = [engine.optimizer]
            if not hasattr(engine.optimizer, "defaults"):  # schedulers look there if momentum is set
                engine.optimizer.defaults = engine.basic_optimizer.defaults
            clipping = unit.config.deepspeed_config.get("gradient_clipping") or 0.0
            fixed = self.config.deepspeed_config.get("gradient_clipping") not in (None, settings.AUTO, 0.0)
            self.gradients[unit] = gradients.of(engine, clipping, fixed)
            model = unit.models[0]
            unit.detach.append(run_without_graph(model) if self.config.stage == 3 else keep_loaded(unit))
            if self.sharing > 1:
                require_exchange(model, self.sharing)
        gradients.count_backward_once(engine)
        self._replace_dummies(unit, engine)

    def _replace_dummies(self, unit: Unit, engine: Any) -> None:
        """Put real schedulers in the place of each `DummyScheduler`: from its function, or from the JSON."""
        own = engine.lr_scheduler
        if own is not None and self.run.config.step_scheduler_with_optimizer:  # the engine steps it
            own = EngineScheduler(own, engine.basic_optimizer)
        for number, each in enumerate(unit.schedulers):
            if isinstance(each, DummyScheduler):
                make = each.lr_scheduler_callable
                unit.schedulers[number] = own if make is None else make(engine.basic_optimizer)
        if isinstance(own, EngineScheduler) and own not in unit.schedulers:
            unit.schedulers.append(own)
        if own in unit.schedulers and not isinstance(own, EngineScheduler):
            engine.lr_scheduler = None  # left to the user

    def _engine(self, unit: Unit) -> Any:
        deepspeed = deepspeed_for(self.run, self)
        self._units.add(unit)
        told = auto_values.engine_settings(unit.config.deepspeed_config, unit)
        if told["fp16"]["enabled"]:
            self._require_float16(deepspeed, trains=bool(unit.optimizers))
        # An engine cannot take a late optimizer: the old one makes room.
        for engine in unit.wrapped:
            dismantle(engine)
        groups = [list(g["params"]) for each in unit.optimizers for g in getattr(each, "param_groups", ())]
        self._fetch_whole(unit.models[0])
        for parameter in unit.models[0].parameters():  # in another order of memory it cannot send them
            parameter.data = parameter.data.contiguous()
        given: dict[str, Any] = {}
        for optimizer in unit.optimizers:
            # ZeRO takes the dtype of gradients from the first parameter: not from a frozen one.
            for group in getattr(optimizer, "param_groups", ()) if self.config.stage else ():
                group["params"].sort(key=lambda parameter: not parameter.requires_grad)
            dummy = isinstance(optimizer, DummyOptim)
            given["model_parameters" if dummy else "optimizer"] = getattr(optimizer, "parameters", optimizer)
        try:
            users = [each for each in unit.optimizers if hasattr(each, "register_step_pre_hook")]
            with quiet(), without_first_steps(users):
                engine = deepspeed.initialize(model=unit.models[0], config=told, **given)[0]
        except (
            AssertionError,
            ValueError,
        ) as error:  # DeepSpeed's message names the settings that conflict
            self.release(unit)
            raise ConfigError(
                f"DeepSpeed makes no engine of unit {unit.name!r}: {error}\nchange it in hf_ds_config"
            ) from error
        own, zero = engine.basic_optimizer, engine.optimizer
        if getattr(zero, "optimizer", own) is not own:  # a new Adagrad with one group, whose rate nobody sets
            own.state, zero.optimizer = zero.optimizer.state, own
            getattr(zero, "_link_all_hp_params", bool)()  # of all groups
        experts.rename(unit)
        self.remember_groups(unit, groups)
        return engine

    def _require_float16(self, deepspeed: Any, *, trains: bool) -> None:
        if trains and self.config.stage == 0:
            raise ConfigError(
                "in ZeRO stage 0 DeepSpeed does not scale fp16's loss, and divides gradients by the scale\n"
                "set zero_stage to 1, 2 or 3, or mixed_precision: bf16"
            )
        if not deepspeed.get_accelerator().is_fp16_supported():
            raise ConfigError(
                f"DeepSpeed trains in float16 (mixed_precision fp16), which {self.run.device} cannot do\n"
                "set mixed_precision: bf16"
            )

    def _fetch_whole(self, model: nn.Module) -> None:
        """Have layers that use a few of their parts, such as experts, fetched whole."""
        names = [name.strip() for name in (self.config.transformer_moe_cls_names or "").split(",") if name]
        found = {type(module).__name__: type(module) for module in model.modules()}
        if unknown := [name for name in names if name not in found]:
            raise ConfigError(
                f"transformer_moe_cls_names: the {type(model).__name__} has no {', '.join(unknown)}\n"
                "give the names of the classes of its layers"
            )
        if names and self.config.stage == 3:
            from deepspeed.utils import set_z3_leaf_modules

            set_z3_leaf_modules(model, [found[name] for name in names])

    @implements(hooks.unwrap_model)
    def unwrap_model(self, unit: Unit, model: nn.Module, keep_compiled: bool) -> nn.Module:
        inner: Any = model.module if model in unit.wrapped else model
        unwrapped: nn.Module = self.below.unwrap_model(unit, inner, keep_compiled)
        return unwrapped

    @implements(hooks.model_init_context)
    def model_init_context(self, unit_name: str | None) -> AbstractContextManager[Any] | None:
        return sharded_init(self, self.config, self.run) if self.config.shards_init else None

    @implements(hooks.release)
    def release(self, unit: Unit) -> None:
        """Take the engine apart; the user's module works on (stages 0 to 2)."""
        self.gradients.pop(unit, None)
        self.forget(unit)
        for engine in unit.wrapped:
            dismantle(engine)
        self._units.discard(unit)
        if not self._units:
            leave(self)

    # -- each step -------------------------------------------------------------------------------

    @implements(hooks.reduce_gradients)
    def reduce_gradients(self, unit: Unit) -> None:
        self.gradients[unit].reduce()

    @implements(hooks.clip_gradients)
    def clip_gradients(
        self, unit: Unit, parameters: Sequence[nn.Parameter], limit: float, norm_type: float | None
    ) -> Tensor | None:
        held = self.gradients[unit]
        if norm_type is None:
            held.clamp(limit)
            return None
        if held.fixed and held.configured != limit and math.isfinite(limit):
            raise AccelError(
                f"clip_grad_norm_ asks for {limit}, and gradient_clipping of the DeepSpeed config for"
                f' {held.configured}\nset gradient_clipping to "auto", or leave clip_grad_norm_ out'
            )
        return held.clip(limit)

    @implements(hooks.optimizer_step)
    def optimizer_step(self, unit: Unit, optimizer: Optimizer, closure: Callable[[], Any] | None) -> bool:
        return self.gradients[unit].step()

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
    """With a loss scale: backward goes through the engine."""

    @implements(hooks.backward)
    def backward(self, unit: Unit, loss: Tensor, boundary: bool, options: Mapping[str, Any]) -> None:
        unknown = sorted(set(options) - {"retain_graph"})
        if unknown:
            raise AccelError(
                f"backward({', '.join(unknown)}=...): under fp16 DeepSpeed's engine takes retain_graph only\n"
                "leave them out, or use bf16 or float32"
            )
        engine: Any = unit.wrapped[0]
        engine.backward(loss, scale_wrt_gas=False, **options)

"""The strategy plugin `megatron`.

An engine a unit, whose steps megatron-core schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve
from torch.utils._pytree import tree_map_only

from accel_core import AccelError, ConfigError, MeshDim, StepOutput, hooks, implements
from accel_megatron import adapters, building, float8, library, settings, unsplit
from accel_megatron.checks import of_model, of_optimizers, of_world
from accel_megatron.config import MegatronLMPlugin, Sized
from accel_megatron.datasets import ResumableSampler
from accel_megatron.engine import Engine, ForwardLoss
from accel_megatron.groups import by_conditions
from accel_megatron.placeholders import MegatronLMDummyScheduler, Schedule
from accel_megatron.state import MegatronState
from accel_megatron.stepping import Stepper

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from accel_core import Run, RunConfig, Unit, World

__all__ = ["Megatron"]


class Megatron(MegatronState):
    """Tensor, pipeline, sequence, expert and data parallelism by megatron-core."""

    below: Any

    def __init__(self, config: MegatronLMPlugin | None, run: Run) -> None:
        super().__init__()
        self.config = Sized.of(config or MegatronLMPlugin(), run.config.parallelism, run.world.size)
        self.run = run

    @implements(hooks.refuse)
    def refuse(self, config: RunConfig) -> Sequence[str]:
        if reason := library.unusable():
            return [reason]
        reasons = [
            *of_world(self.config, self.run.world),
            *settings.refuse_unknown(self.config),
            *settings.refuse_scaler(self.run),
            *float8.refused(self.run),
        ]
        asked = self.run.hooks.mesh_dims(config, self.run.world)
        foreign = [dim for dim in asked if dim not in self.mesh_dims(config, self.run.world)]
        reasons += [
            f"megatron: an extension divides the ranks along {dim.name!r}, and megatron-core divides them"
            " along tp, pp and dp_replicate alone: each rank would train on its part as on the whole\n"
            f"set parallelism.{dim.name}: 1, or strategy: fsdp beside it"
            for dim in foreign
        ]
        return reasons

    @implements(hooks.mesh_dims)
    def mesh_dims(self, config: RunConfig, world: World) -> Sequence[MeshDim]:
        """In megatron-core's own order of ranks.

        Experts are spread over the ranks that read different data.
        """
        return [
            MeshDim("pp", self.config.pp),
            MeshDim("dp_replicate", config.parallelism.get("dp_replicate", -1)),
            MeshDim("tp", self.config.tp),
        ]

    # -- prepare ---------------------------------------------------------------------------------

    @implements(hooks.model_init_context)
    def model_init_context(self, unit_name: str | None) -> AbstractContextManager[Any] | None:
        """Only rank 0 has weights, which go to the others one by one."""
        return nullcontext() if self.run.world.rank == 0 else torch.device("meta")

    @implements(hooks.refuse_unit)
    def refuse_unit(
        self, unit: Unit, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> Sequence[str]:
        if len(unit.models) + len(models) > 1:
            return ["megatron-core has one model per unit\nprepare each model with an optimizer of its own"]
        is_half = self.run.config.mixed_precision != "no"
        reasons = list(of_optimizers(self.config, optimizers, self.run.device))
        for model in models:
            reasons += of_model(self.config, model, is_half=is_half)
            reasons += float8.of_model(self.run, model)
        return reasons

    @implements(hooks.prepare_unit)
    def prepare_unit(self, unit: Unit, loaders: Sequence[Any]) -> None:
        """Give all ranks the weights of rank 0. Collective.

        A late optimizer is made for the chunks that are there.
        """
        skips = any(self.config.consumed_samples)
        if skips and any(not isinstance(loader.sampler, ResumableSampler) for loader in loaders):
            raise ConfigError(
                "megatron.consumed_samples is of accel_megatron.indexed_loaders; this is another DataLoader\n"
                "leave it out, and say accelerator.skip_first_batches(loader, batches)"
            )
        new = unit not in self.engines
        try:
            self._prepare(unit, new)
        except BaseException:  # of any kind: it goes on
            if new and hasattr(unit.models[0], "chunks"):  # which may be prepared again
                self.engines.pop(unit, None)
                self.steppers.pop(unit, None)
            elif new:
                self.release(unit)
            raise
        for number, each in enumerate(unit.schedulers):
            if isinstance(each, MegatronLMDummyScheduler):
                stepper = self.steppers[unit]
                unit.schedulers[number] = Schedule(each, stepper.user_optimizer, self.config, self.run)

    def _prepare(self, unit: Unit, new: bool) -> None:
        weights = {
            name: each.detach() for name, each in unit.models[0].named_parameters()
        }  # before they are cast
        if new:
            with library.own_streams(self.run.device):
                self._build(unit)
        engine = self.engines[unit]
        if unit.optimizers and unit not in self.steppers:
            by_conditions(self.config, unit)
            stepper = Stepper(self.run, unit, self.config, engine.chunks)
            self.steppers[unit] = stepper
        # Filled by leaves, so after the optimizer is made: they are its masters then.
        if new:
            building.fill(self.model_state(unit), weights, self.run)
            if isinstance(engine, unsplit.UnsplitEngine):
                building.share_buffers(unit.models[0], self.run)
            else:
                building.empty(unit.models[0])
            self.refresh(unit)
        engine.train(unit.models[0].training)

    def _build(self, unit: Unit) -> None:
        model: Any = unit.models[0]
        if hasattr(model, "chunks"):  # made by build_model
            engine = Engine(model, model.chunks, model.adapter, self.config)
        elif adapters.why_unsupported(model):
            library.enter(self.run, self, library.Layout.of(self.config, None))
            engine = unsplit.UnsplitEngine.of(self.run, self.config, model)
        else:
            adapter = adapters.adapter_of(model)
            virtual = building.chunk_numbers(self.config, adapter.layers)
            # Building a chunk needs megatron-core's groups of ranks.
            library.enter(self.run, self, library.Layout.of(self.config, virtual))
            engine = Engine(model, building.build(self.run, self.config, adapter), adapter, self.config)
        float8.require_layers(self.run, engine.chunks.raw)
        engine.unit = unit
        self.engines[unit] = engine
        unit.wrapped.append(engine)
        unit.set_forward_is_collective()

    @implements(hooks.unwrap_model)
    def unwrap_model(self, unit: Unit, model: nn.Module, keep_compiled: bool) -> nn.Module:
        inner: Any = model.module if isinstance(model, Engine) else model
        unwrapped: nn.Module = self.below.unwrap_model(unit, inner, keep_compiled)
        return unwrapped

    @implements(hooks.release)
    def release(self, unit: Unit) -> None:
        self.steppers.pop(unit, None)
        engine = self.engines.pop(unit, None)
        if engine is not None:
            engine.chunks.run = []
            engine.chunks.raw = []
            engine.chunks.shard_map = {}
        if not self.engines:
            library.leave(self)

    # -- each step -------------------------------------------------------------------------------

    @implements(hooks.place_batch)
    def place_batch(self, unit: Unit | None, batch: Any, device: torch.device) -> Any:
        """Give all ranks that share a model the batch of the first one.

        Collective.
        """
        sharing = [
            name for name in ("pp", "tp") if self.run.mesh is not None and self.run.mesh.size(name) > 1
        ]
        if not sharing:
            return batch
        group = self.run.collectives("+".join(sharing))
        return tree_map_only(torch.Tensor, lambda each: group.broadcast(each.contiguous()), batch)

    @implements(hooks.forward_backward)
    def forward_backward(
        self,
        unit: Unit,
        batches: Iterator[Any],
        forward_loss: ForwardLoss,
        microbatches: int | None,
        forward_only: bool,
    ) -> StepOutput:
        """Run the schedule over one window. Collective.

        All ranks get the loss; the last stage also gets the outputs of `forward_loss`.

        `microbatches` None: as many as one step of a loop over model(**batch) has.
        """
        if not forward_only:
            self.engines[unit].refuse_unstepped()
        wanted = microbatches or unit.window.size * self.config.micro_batches
        with unit.whole_window(batches, wanted) as taken:
            share = wanted / unit.window.divisor  # megatron-core divides by all of them
            found = self.engines[unit].run(taken, forward_loss, forward_only=forward_only, scale=share)
            return evolve(found, loss=found.loss * share)

    @implements(hooks.backward)
    def backward(self, unit: Unit, loss: Tensor, boundary: bool, options: Mapping[str, Any]) -> None:
        """Compute gradients of an unsplit model; refuse a loss that is not the engine's."""
        engine = self.engines[unit]
        if isinstance(engine, unsplit.UnsplitEngine):
            self.steppers[unit].inner.scale_loss(loss).backward(**options)
            return
        engine.scaled = None
        if options:
            raise AccelError(
                f"backward({', '.join(options)}=...): megatron-core's schedule takes none\nleave it out"
            )
        loss.backward()
        if not engine.is_own(loss):
            raise AccelError(
                "backward: megatron-core has done backward with the model's forward, of the model's own loss,"
                " and this is another\n"
                "compute your loss in accelerator.forward_backward(model, batches, forward_loss)"
            )

    @implements(hooks.reduce_gradients)
    def reduce_gradients(self, unit: Unit) -> None:
        self.steppers[unit].reduce()

    @implements(hooks.unscale)
    def unscale(self, unit: Unit, optimizer: Optimizer) -> None:
        self.steppers[unit].prepare()

    @implements(hooks.clip_gradients)
    def clip_gradients(
        self, unit: Unit, parameters: Sequence[nn.Parameter], limit: float, norm_type: float | None
    ) -> Tensor | None:
        if norm_type is None:
            self.steppers[unit].clamp(limit)
            return None
        asked = self.config.gradient_clipping
        if asked not in (None, 0, limit) and limit != float("inf"):
            raise AccelError(
                f"clip_grad_norm_ asks for {limit}, and megatron.gradient_clipping for {asked}\n"
                "leave one of them out"
            )
        return torch.tensor(self.steppers[unit].clip(limit), device=self.run.device)

    @implements(hooks.optimizer_step)
    def optimizer_step(self, unit: Unit, optimizer: Optimizer, closure: Callable[[], Any] | None) -> bool:
        return self.steppers[unit].step()

    @implements(hooks.zero_grad)
    def zero_grad(self, unit: Unit, optimizer: Optimizer, set_to_none: bool) -> None:
        self.engines[unit].has_gradients = False
        self.steppers[unit].drop()

    @implements(hooks.grad_scaler)
    def grad_scaler(self, unit: Unit) -> None:
        return None

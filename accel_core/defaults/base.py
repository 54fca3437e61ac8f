"""The base layer: the default of every owner hook, in terms of torch alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from accel_core.checkpoint.defaults import BaseState
from accel_core.contract import hooks
from accel_core.contract.bound import no_op
from accel_core.contract.hooks import implements
from accel_core.contract.mesh import Mesh, arrange
from accel_core.contract.unit import StepOutput
from accel_core.contract.world import Collectives, Topology
from accel_core.defaults.device import local_device
from accel_core.distributed import process_group
from accel_core.distributed.collectives import average
from accel_core.distributed.nested import recursively_apply
from accel_core.errors import AccelError, ConfigError
from accel_core.plugins.discovery import suggest_strategy

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from accel_core.contract.config import InitProcessGroupKwargs
    from accel_core.contract.hooks import Point
    from accel_core.contract.mesh import MeshDim
    from accel_core.contract.run import Run
    from accel_core.contract.unit import Unit
    from accel_core.contract.world import World


class Base(BaseState):
    """The base layer. It has no card and no slot, and is always at the bottom."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._copy_gradients: Callable[[Unit], None] | None = None
        """None if no model is recorded as graphs."""

    # -- set-up ----------------------------------------------------------------------------------

    @implements(hooks.select_device)
    def select_device(self, world: World) -> torch.device:
        kind = self.run.stack.device.card.torch_device
        return local_device(kind or "cpu", world)

    @implements(hooks.capabilities)
    def capabilities(self, device: torch.device) -> frozenset[str]:
        card = self.run.stack.device.card
        lacking = {"memory_stats"} if device.type == "cpu" else set[str]()
        key = torch._C._dispatch_key_for_device(device.type)
        if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm", key):
            lacking.add("fp8")
        return frozenset(card.offers - lacking)

    @implements(hooks.init_process_group)
    def init_process_group(
        self, world: World, backends: Mapping[str, str], options: InitProcessGroupKwargs
    ) -> Callable[[], None]:
        process_group.create(world, backends, options)
        return process_group.destroy

    @implements(hooks.build_mesh)
    def build_mesh(self, dims: Sequence[MeshDim], world: World) -> Mesh | None:
        arranged = arrange(dims, world.size)
        if not arranged or world.size == 1:
            return None
        names, sizes = zip(*[(dim.name, dim.size) for dim in arranged], strict=True)
        mesh = process_group.shared_mesh(self.run.device.type, sizes, names)
        return Mesh(arranged, world.rank, mesh)

    @implements(hooks.collectives)
    def collectives(self, dim: str) -> Collectives:
        return process_group.collectives_over(self.run, dim)

    # -- prepare ---------------------------------------------------------------------------------

    @implements(hooks.transform_model)
    def transform_model(self, unit: Unit, model: nn.Module, phase: str) -> nn.Module:
        if phase == "compile":
            # late: start-up need not wait for it
            from accel_core.training import compile as compiling

            config, graphs = self.run.config.compile, compiling.comes_with_graphs(model)
            compiled = compiling.compile_model(model, config, self.run.stack.device.card.compile_backend)
            unit.detach.extend(partial(compiling.run_eagerly, module) for module in compiled)
            graphs = graphs or bool(compiled and compiling.records_graphs(config))
            if graphs:
                self._copy_gradients = compiling.copy_gradients
                if compiling.keep_gradients not in self.run.after_backward:
                    self.run.after_backward.append(compiling.keep_gradients)
        return model

    @implements(hooks.place_model)
    def place_model(self, unit: Unit, model: nn.Module, device: torch.device) -> nn.Module:
        named = (*model.named_parameters(), *model.named_buffers())
        if empty := next((name for name, tensor in named if tensor.is_meta and device.type != "meta"), None):
            raise AccelError(
                f"prepare: {empty} of the {type(model).__name__} is on the meta device and has no values\n"
                f"fill it before: model.to_empty(device={str(device)!r}), then load or reset its weights;"
                " or, for weights that are loaded only while they are used,"
                f" {suggest_strategy('streamed_weights')}"
            )
        hooked = [module for module in model.modules() if module._forward_pre_hooks]
        if places := next(filter(None, map(_placing_hook, hooked)), None):
            first = next((name for name, _ in named), "the model")
            raise AccelError(
                f"prepare: {places} places the weights of the {type(model).__name__}, {first} first, and"
                f" strategy {unit.strategy!r} would move them to {device}\n"
                f"{suggest_strategy('streamed_weights')}; or leave it where it is: device_placement=[False]"
            )
        return model.to(device)

    @implements(hooks.wrap_model)
    def wrap_model(self, unit: Unit, model: nn.Module) -> nn.Module:
        return model

    @no_op
    @implements(hooks.prepare_unit)
    def prepare_unit(self, unit: Unit, loaders: Sequence[Any]) -> None:
        if unit.build_each is not None:
            unit.build_each()

    @no_op
    @implements(hooks.wrap_dataloader)
    def wrap_dataloader(self, loader: Iterable[Any], topology: Topology) -> Iterable[Any]:
        return loader

    @implements(hooks.unwrap_model)
    def unwrap_model(self, unit: Unit, model: nn.Module, keep_compiled: bool) -> nn.Module:
        from accel_core.training.compile import uncompiled  # late: start-up need not wait for it

        return model if keep_compiled else uncompiled(model)

    @implements(hooks.checkpoint_function)
    def checkpoint_function(self, unit: Unit) -> Callable[..., Any]:
        return partial(checkpoint, use_reentrant=False)

    # -- each step -------------------------------------------------------------------------------

    @no_op
    @implements(hooks.backward)
    def backward(self, unit: Unit, loss: Tensor, boundary: bool, options: Mapping[str, Any]) -> None:
        loss.backward(**options)

    @no_op
    @implements(hooks.no_sync)
    def no_sync(self, unit: Unit, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        return nullcontext()

    @implements(hooks.forward_backward)
    def forward_backward(
        self,
        unit: Unit,
        batches: Iterator[Any],
        forward_loss: Callable[[nn.Module, Any], tuple[Tensor, Any]],
        microbatches: int | None,
        forward_only: bool,
    ) -> StepOutput:
        losses, outputs = [], []
        steps, model, copy_gradients = unit.steps, unit.wrapped[0], self._copy_gradients
        taken = [next(batches) for _ in range(microbatches or unit.window.size)]
        unit.window.fill(len(taken))
        for number, batch in enumerate(taken, 1):
            last = number == len(taken)
            quiet = steps.no_sync and not (last or forward_only)
            with (
                steps.no_sync(unit, unit.wrapped) if quiet else nullcontext(),
                steps.step_context(unit, batch) if steps.step_context else nullcontext(),
            ):
                loss, output = forward_loss(model, batch)
                part = unit.window.part_of(loss)
                if not forward_only:
                    unit.hooks.backward(unit, part, last, {})
            if copy_gradients is not None and not last:  # the next replay of a graph overwrites its outputs
                copy_gradients(unit)
                part, output = part.clone(), recursively_apply(torch.clone, output)
            losses.append(part.detach())
            outputs.append(output)
        return StepOutput(loss=torch.stack(losses).sum(), outputs=tuple(outputs))

    @no_op
    @implements(hooks.reduce_gradients)
    def reduce_gradients(self, unit: Unit) -> None:
        return None

    @no_op
    @implements(hooks.unscale)
    def unscale(self, unit: Unit, optimizer: Optimizer) -> None:
        return None

    @no_op
    @implements(hooks.clip_gradients)
    def clip_gradients(
        self, unit: Unit, parameters: Sequence[nn.Parameter], limit: float, norm_type: float | None
    ) -> Tensor | None:
        if norm_type is None:
            nn.utils.clip_grad_value_(parameters, limit)
            return None
        return nn.utils.clip_grad_norm_(parameters, limit, norm_type)

    @no_op
    @implements(hooks.optimizer_step)
    def optimizer_step(self, unit: Unit, optimizer: Optimizer, closure: Callable[[], Any] | None) -> bool:
        optimizer.step(closure) if closure is not None else optimizer.step()
        return True

    @no_op
    @implements(hooks.zero_grad)
    def zero_grad(self, unit: Unit, optimizer: Optimizer, set_to_none: bool) -> None:
        optimizer.zero_grad(set_to_none)

    @implements(hooks.grad_scaler)
    def grad_scaler(self, unit: Unit) -> None:
        return None

    @no_op
    @implements(hooks.mark_step)
    def mark_step(self, point: Point) -> None:
        return None

    @implements(hooks.join)
    def join(self, units: Sequence[Unit], even_batches: bool | None) -> AbstractContextManager[Any]:
        if self.run.world.size == 1:
            return nullcontext()
        raise ConfigError(
            f"strategy {units[0].strategy!r} cannot train where ranks run out of batches at different times\n"
            f"leave even_batches=True; {suggest_strategy('join')}"
        )

    @implements(hooks.average_parameters)
    def average_parameters(self, unit: Unit) -> None:
        group = self.run.collectives(self.run.topology.loss_dim)
        average((each for each in unit.named_parameters().values() if each.requires_grad), group)

    # -- device services -------------------------------------------------------------------------

    @implements(hooks.memory_stats)
    def memory_stats(self, device: torch.device) -> Mapping[str, int]:
        if device.type == "cpu":
            return {}
        module = torch.get_device_module(device)
        known = {
            "allocated": "memory_allocated",
            "reserved": "memory_reserved",
            "peak": "max_memory_allocated",
        }
        stats = {
            key: int(getattr(module, name)(device)) for key, name in known.items() if hasattr(module, name)
        }
        if hasattr(module, "mem_get_info"):
            free, stats["total"] = map(int, module.mem_get_info(device))
            # torch's allocator keeps freed memory, which the driver counts as used.
            cached = stats["reserved"] - stats["allocated"] if "reserved" in stats else 0
            stats["free"] = free + cached
        return stats


def _placing_hook(module: nn.Module) -> str | None:
    """Return `places_weights` of a module's forward hooks: the name of the hook that moves its weights."""
    marks = (getattr(hook, "places_weights", None) for hook in module._forward_pre_hooks.values())
    return next(filter(None, marks), None)


class Single:
    """The strategy of one process: the base layer as it is; in a larger world for units that do not train."""

    def __init__(self, config: Any, run: Run) -> None:
        self.run = run

    @implements(hooks.refuse_unit)
    def refuse_unit(
        self, unit: Unit, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> Sequence[str]:
        if self.run.world.size == 1 or not optimizers:
            return ()
        reason = (
            f"unit {unit.name!r} has an optimizer, but strategy 'single' would train"
            f" a different copy on each of {self.run.world.size} ranks\n"
            "prepare it with another strategy, or without its optimizer"
        )
        return [reason]

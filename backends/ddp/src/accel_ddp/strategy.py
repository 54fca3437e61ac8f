"""Strategy `ddp`: each rank trains a copy of the model, and DistributedDataParallel averages gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch.distributed.algorithms.join import Join

from accel_core import AccelError, ConfigError, Entry, MeshDim, hooks, implements
from accel_ddp import comm_hooks
from accel_ddp.config import POWER_SGD, DistributedDataParallelKwargs
from accel_ddp.wrapper import COPIES, RUNS, DistributedDataParallel, refuse_hooks

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from accel_core import InitProcessGroupKwargs, Run, RunConfig, Unit, Window, World

__all__ = ["DataParallel", "make"]

_REDUCIBLE_DTYPES = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
}
"""Dtypes that the collectives of every process group support."""
_HOOK_OPTIONS = ("comm_hook", "comm_wrapper", "comm_state_option")
"""Options that are not arguments of DistributedDataParallel."""


def make(config: DistributedDataParallelKwargs | None, run: Run) -> DataParallel:
    """Return the plugin; only power SGD needs the class that has a hook in each step."""
    config = config or DistributedDataParallelKwargs()
    return (CompressedByPowerSGD if config.comm_hook in POWER_SGD else DataParallel)(config, run)


class DataParallel:
    """Strategy `ddp`.

    Models without trainable parameters, and all models of a world of one process, are not wrapped.
    """

    below: Any

    def __init__(self, config: DistributedDataParallelKwargs, run: Run) -> None:
        self.config = config
        self.run = run

    @implements(hooks.mesh_dims)
    def mesh_dims(self, config: RunConfig, world: World) -> Sequence[MeshDim]:
        size = config.parallelism.get("dp_replicate")
        return [] if size is None else [MeshDim("dp_replicate", size)]

    @implements(hooks.wrap_model)
    def wrap_model(self, unit: Unit, model: nn.Module) -> nn.Module:
        """Copy rank 0's parameters and buffers to all ranks. Collective."""
        if self.run.world.size == 1 or not any(p.requires_grad for p in model.parameters()):
            return model
        refuse_hooks(model)
        # Arguments that equal torch's default are not passed, because some of them warn when they are.
        # device_ids is not passed: batches are on the device already, and torch would walk each batch.
        arguments = {k: v for k, v in self.config.to_kwargs().items() if k not in _HOOK_OPTIONS}
        with warnings.catch_warnings():
            # torch's new argument, forward_sync_buffers=False, still copies rank 0's buffers at the start.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            with _name_refused_tensors(model):
                wrapped = DistributedDataParallel(model, **arguments)
        comm_hooks.register(wrapped, self.config)
        RUNS[wrapped] = ref(self.run)
        return wrapped

    @implements(hooks.unwrap_model)
    def unwrap_model(self, unit: Unit, model: nn.Module, keep_compiled: bool) -> nn.Module:
        inner: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
        unwrapped: nn.Module = self.below.unwrap_model(unit, inner, keep_compiled)
        return unwrapped

    @implements(hooks.no_sync)
    def no_sync(self, unit: Unit, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        # torch records a static graph in the first backward, and can do so only in a backward that reduces.
        # Reducing the first micro-batch too does not change the gradients of the window.
        recorded = [m for m in _parallel(models) if not (m.static_graph and _has_unrecorded_graph(m))]
        return _no_sync(recorded)

    @implements(hooks.join)
    def join(self, units: Sequence[Unit], even_batches: bool | None) -> AbstractContextManager[Any]:
        """Return a context in which ranks without batches take part in the collectives of the other ranks.

        At its end all ranks have the weights of the rank that trained last. `even_batches` concerns the data
        loaders, which core changes.
        """
        parallel = {model: unit for unit in units for model in _parallel(unit.wrapped)}
        return _JoinRanks(parallel) if parallel else nullcontext()

    @implements(hooks.save_state)
    def save_state(self, unit: Unit) -> Mapping[str, Entry]:
        """Return the number of iterations of power SGD.

        Its error feedback and warm start are not saved: they belong to buckets, which a new run builds again.
        """
        iterations = list(map(comm_hooks.iterations, _parallel(unit.wrapped)))
        return {"power_sgd": Entry(value=iterations)} if any(n is not None for n in iterations) else {}

    @implements(hooks.load_state)
    def load_state(self, unit: Unit, entries: Mapping[str, Entry]) -> None:
        models = list(_parallel(unit.wrapped))
        for model in models:  # also if the checkpoint of another strategy has no entry
            comm_hooks.forget_gradients(model)
        saved: Any = entries["power_sgd"].value if "power_sgd" in entries else []
        for model, iterations in zip(models, saved, strict=False):
            comm_hooks.begin_anew(model, iterations or 0)

    @implements(hooks.release)
    def release(self, unit: Unit) -> None:
        # The model that `unwrap_model` returns can still be used.
        for model in _parallel(unit.wrapped):
            comm_hooks.settle(model)
            model.release()

    @implements(hooks.init_process_group)
    def init_process_group(
        self, world: World, backends: Mapping[str, str], options: InitProcessGroupKwargs
    ) -> Callable[[], None]:
        end: Callable[[], None] = self.below.init_process_group(world, backends, options)

        def release_and_end() -> None:
            for copy in _parallel([*COPIES]):
                copy.release()
            end()

        return release_and_end


class CompressedByPowerSGD(DataParallel):
    """Strategy `ddp` with a power SGD hook, which adds the compression error of earlier gradients."""

    @implements(hooks.after_step)
    def after_step(self, unit: Unit, optimizer: Optimizer, applied: bool) -> None:
        if not applied:  # on all ranks: they have the same gradients
            for model in _parallel(unit.wrapped):
                comm_hooks.forget_gradients(model)


def _parallel(models: Sequence[nn.Module]) -> list[DistributedDataParallel]:
    return [model for model in models if isinstance(model, DistributedDataParallel)]


@contextmanager
def _name_refused_tensors(model: nn.Module) -> Iterator[None]:
    """Raise ConfigError with the names of the tensors whose dtype the process group does not support.

    torch's own error names no tensor.
    """
    try:
        yield
    except RuntimeError as error:
        if "scalar type" not in str(error):
            raise
        tensors = [*model.named_parameters(), *model.named_buffers()]
        odd = [
            f"{name} ({tensor.dtype})" for name, tensor in tensors if tensor.dtype not in _REDUCIBLE_DTYPES
        ]
        raise ConfigError(
            f"ddp: the process group does not carry {', '.join(odd) or 'a dtype of this model'}: {error}\n"
            "keep it in another dtype, or a buffer contiguous()"
        ) from error


def _has_unrecorded_graph(model: DistributedDataParallel) -> bool:
    return not getattr(model, "_static_graph_delay_allreduce_enqueued", True)


@contextmanager
def _no_sync(models: Sequence[DistributedDataParallel]) -> Iterator[None]:
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(model.no_sync())
        yield


class _JoinRanks(Join):
    """torch's Join, which at its end also restores the warning filters and disables joining."""

    def __init__(self, models: Mapping[DistributedDataParallel, Unit]) -> None:
        super().__init__(list(models))
        self._hooks = [
            model.register_forward_pre_hook(partial(_refuse_short_window, unit.window))
            for model, unit in models.items()
        ]
        for model in models:
            evaluation = _LocalEvaluation(model)
            self._hooks.append(model.register_forward_pre_hook(evaluation.begin))
            self._hooks.append(model.register_forward_hook(evaluation.end, always_call=True))

    def __exit__(self, *exception: object) -> None:
        for hook in self._hooks:
            hook.remove()
        with warnings.catch_warnings():
            super().__exit__(*exception)  # type: ignore[arg-type]
        Join(self._joinables, enable=False)


class _LocalEvaluation:
    """Forward hooks that turn off the collectives of a forward without gradients.

    torch's Join announces each forward to the ranks that have no more batches, and these ranks would wait for
    a backward that never comes. Buffers are not broadcast either, so any rank may evaluate at any time.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = model
        self._undo = ExitStack()

    def begin(self, model: nn.Module, inputs: Any) -> None:
        self._undo.close()  # `end` did not run if Ctrl-C interrupted the last forward
        if not torch.is_grad_enabled():
            for name, value in (
                ("_join_config", self._model._join_config._replace(enable=False)),
                ("require_forward_param_sync", False),
            ):
                self._undo.callback(setattr, self._model, name, getattr(self._model, name))
                setattr(self._model, name, value)

    def end(self, model: nn.Module, inputs: Any, output: Any) -> None:
        self._undo.close()


def _refuse_short_window(window: Window, model: nn.Module, inputs: Any) -> None:
    # This rank would reduce gradients while other ranks, in the middle of their windows, would not: the
    # collective would never complete.
    if window.boundary and 0 < window.index + 1 < window.size and torch.is_grad_enabled():
        raise AccelError(
            f"join: this rank's batches end after {window.index + 1} of the {window.size} micro-batches of"
            " a window, and the other ranks may not be at the end of theirs\n"
            f"set gradient_accumulation_steps: 1, or give each rank a multiple of {window.size} batches"
        )

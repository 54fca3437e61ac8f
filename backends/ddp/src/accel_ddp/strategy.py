"""Each rank trains a copy of the model.

DistributedDataParallel averages gradients in backward.
"""

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

_CARRIED = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
}
"""The dtypes that every process group carries."""
_NOT_TORCHS = ("comm_hook", "comm_wrapper", "comm_state_option")


def make(config: DistributedDataParallelKwargs | None, run: Run) -> DataParallel:
    """Make the plugin, of the class that the communication hook needs.

    Only power SGD has something to do in each step.
    """
    config = config or DistributedDataParallelKwargs()
    return (CompressedByPowerSGD if config.comm_hook in POWER_SGD else DataParallel)(config, run)


class DataParallel:
    """Strategy `ddp`.

    In a world of one, and for models that train nothing, it wraps nothing.
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
        # Only what differs from torch's defaults, some of which warn when they are passed. No
        # device_ids: batches are on the device already, and torch would walk each for nothing.
        arguments = {k: v for k, v in self.config.to_kwargs().items() if k not in _NOT_TORCHS}
        with warnings.catch_warnings():
            # Its successor, forward_sync_buffers, would still copy rank 0's buffers at the start.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            with _named(model):
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
        # A static graph is recorded in the first backward, which torch can do only when it reduces.
        # Reducing a first micro-batch too gives the same gradients.
        quiet = [m for m in _parallel(models) if not (m.static_graph and _unrecorded(m))]
        return _each_quiet(quiet)

    @implements(hooks.join)
    def join(self, units: Sequence[Unit], even_batches: bool | None) -> AbstractContextManager[Any]:
        """Ranks that have run out shadow the others' collectives.

        Weights are the last rank's.

        How loaders share out batches (`even_batches`) is core's business.
        """
        parallel = {model: unit for unit in units for model in _parallel(unit.wrapped)}
        return _Uneven(parallel) if parallel else nullcontext()

    @implements(hooks.save_state)
    def save_state(self, unit: Unit) -> Mapping[str, Entry]:
        """Return the number of steps that power SGD has seen.

        What it keeps of gradients is not saved: it belongs to buckets, which a new run lays out anew.
        """
        seen = list(map(comm_hooks.iterations, _parallel(unit.wrapped)))
        return {"power_sgd": Entry(value=seen)} if any(each is not None for each in seen) else {}

    @implements(hooks.load_state)
    def load_state(self, unit: Unit, entries: Mapping[str, Entry]) -> None:
        models = list(_parallel(unit.wrapped))
        for model in models:  # whatever the checkpoint holds, of another strategy's run say
            comm_hooks.forget_gradients(model)
        seen: Any = entries["power_sgd"].value if "power_sgd" in entries else []
        for model, iterations in zip(models, seen, strict=False):
            comm_hooks.begin_anew(model, iterations or 0)

    @implements(hooks.release)
    def release(self, unit: Unit) -> None:
        # The model inside, which `unwrap_model` gives, works on.
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
    """Adds to gradients what it has not sent of earlier ones."""

    @implements(hooks.after_step)
    def after_step(self, unit: Unit, optimizer: Optimizer, applied: bool) -> None:
        if not applied:  # all ranks have the same gradients, and skip together
            for model in _parallel(unit.wrapped):
                comm_hooks.forget_gradients(model)


def _parallel(models: Sequence[nn.Module]) -> list[DistributedDataParallel]:
    return [model for model in models if isinstance(model, DistributedDataParallel)]


@contextmanager
def _named(model: nn.Module) -> Iterator[None]:
    """Say which tensor the process group cannot carry to the other ranks.

    Torch's error names none.
    """
    try:
        yield
    except RuntimeError as error:
        if "scalar type" not in str(error):
            raise
        tensors = [*model.named_parameters(), *model.named_buffers()]
        odd = [f"{name} ({tensor.dtype})" for name, tensor in tensors if tensor.dtype not in _CARRIED]
        raise ConfigError(
            f"ddp: the process group does not carry {', '.join(odd) or 'a dtype of this model'}: {error}\n"
            "keep it in another dtype, or a buffer contiguous()"
        ) from error


def _unrecorded(model: DistributedDataParallel) -> bool:
    return not getattr(model, "_static_graph_delay_allreduce_enqueued", True)


@contextmanager
def _each_quiet(models: Sequence[DistributedDataParallel]) -> Iterator[None]:
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(model.no_sync())
        yield


class _Uneven(Join):
    """Torch's Join, without its leftovers (warning filters, joining enabled)."""

    def __init__(self, models: Mapping[DistributedDataParallel, Unit]) -> None:
        super().__init__(list(models))
        self._hooks = [
            model.register_forward_pre_hook(partial(_refuse_short_window, unit.window))
            for model, unit in models.items()
        ]
        for model in models:
            evaluation = _Evaluation(model)
            self._hooks.append(model.register_forward_pre_hook(evaluation.begin))
            self._hooks.append(model.register_forward_hook(evaluation.end, always_call=True))

    def __exit__(self, *exception: object) -> None:
        for hook in self._hooks:
            hook.remove()
        with warnings.catch_warnings():
            super().__exit__(*exception)  # type: ignore[arg-type]
        Join(self._joinables, enable=False)


class _Evaluation:
    """Keeps a forward without gradients to its rank.

    Torch's Join announces each forward to ranks that have run out, and those would wait for its backward.
    Buffers are not made alike either, so that any rank may evaluate at any time.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = model
        self._undo = ExitStack()

    def begin(self, model: nn.Module, inputs: Any) -> None:
        self._undo.close()  # Ctrl-C may have kept `end` from its turn
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
    # This rank would reduce its gradients while others, in the midst of their windows, would not:
    # collectives that never meet.
    if window.boundary and 0 < window.index + 1 < window.size and torch.is_grad_enabled():
        raise AccelError(
            f"join: this rank's batches end after {window.index + 1} of the {window.size} micro-batches of"
            " a window, and the other ranks may not be at the end of theirs\n"
            f"set gradient_accumulation_steps: 1, or give each rank a multiple of {window.size} batches"
        )

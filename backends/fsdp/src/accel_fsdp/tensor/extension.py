"""Extension `tensor-parallel`.

Layers are split over the ranks of mesh dimension `tp`, as plans say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.tensor._random as tracking
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
from torch.utils._pytree import tree_map_only

from accel_core import AccelError, MeshDim, hooks, implements
from accel_fsdp.carriers import refused_carrier
from accel_fsdp.sharding.adopted import is_adopted
from accel_fsdp.sharding.meta import send_weights
from accel_fsdp.tensor.config import TorchTensorParallelPlugin
from accel_fsdp.tensor.plans import plan_of

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from accel_core import Run, RunConfig, Unit, World

__all__ = ["TensorParallel"]


class TensorParallel:
    """Ranks along `tp` read the same data and compute parts of the same layers."""

    below: Any

    def __init__(self, config: TorchTensorParallelPlugin | None, run: Run) -> None:
        self.config = config or TorchTensorParallelPlugin()
        self.run = run
        self._loss_is_parallel = False

    @implements(hooks.mesh_dims)
    def mesh_dims(self, config: RunConfig, world: World) -> Sequence[MeshDim]:
        return [MeshDim("tp", config.parallelism.get("tp", 1))]

    @implements(hooks.refuse_unit)
    def refuse_unit(
        self, unit: Unit, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> Sequence[str]:
        version = getattr(unit.plugin.config, "fsdp_version", None)
        if unit.mesh is None or unit.mesh.size("tp") == 1:
            return ()
        if version != 1:
            return refused_carrier(self.run, "tensor-parallel")
        reason = (
            f"parallelism.tp is {unit.mesh.size('tp')}, but fsdp.fsdp_version 1 stores weights flat,"
            " not as parts of layers\nset fsdp.fsdp_version: 2"
        )
        return [reason]

    @implements(hooks.transform_model)
    def transform_model(self, unit: Unit, model: nn.Module, phase: str) -> nn.Module:
        """Split layers in `parallelize`.

        Collective: all ranks of `tp` begin with the weights of its first.
        """
        size = 1 if unit.mesh is None else unit.mesh.size("tp")
        if phase != "parallelize" or unit.mesh is None or size == 1:
            return model
        mesh, config = unit.mesh.device_mesh["tp"], self.config
        if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            return self._accept(model, mesh)
        plan = plan_of(model, config.parallelize_plan, size, loss_parallel=config.loss_parallel)
        _draw_without_agreement(mesh)
        ties, frozen = _ties(model), _frozen(model)
        _agree(model, mesh.get_group())
        for planned in plan:
            parallelize_module(planned.module, mesh, planned.style, src_data_rank=None)
            planned.module.register_forward_hook(_give_no_views)
            if config.loss_parallel and planned.head:
                planned.module.register_forward_pre_hook(self._require_context)
                planned.module.register_forward_hook(self._whole_without_gradient)
        for (module, key), first in ties.items():
            module._parameters[key] = first[0]._parameters[first[1]]
        for module, key in frozen:  # torch's SequenceParallel makes new parameters, which train
            module._parameters[key].requires_grad_(False)  # type: ignore[union-attr]
        return model

    def _accept(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Keep a model as the program split it, by `tp_plan="auto"` for example.

        Collective.
        """
        name, option = type(model).__name__, "tensor-parallel.parallelize_plan"
        if self.config.parallelize_plan or self.config.loss_parallel:
            option = option if self.config.parallelize_plan else "tensor-parallel.loss_parallel"
            raise AccelError(
                f"{option} is set, but this {name} is split already, by the program\n"
                "leave out one of the two: the option, or what splits the model before prepare"
            )
        for key, parameter in model.named_parameters():
            if isinstance(parameter, DTensor) and parameter.device_mesh != mesh and not is_adopted(model):
                raise AccelError(
                    f"{key} of this {name} is split over {parameter.device_mesh}, not over the run's {mesh}\n"
                    "split the model over accelerator.run.mesh.device_mesh['tp']"
                )
        _agree(model, mesh.get_group())
        model.register_forward_hook(_give_no_views)
        return model

    @implements(hooks.step_context)
    def step_context(self, unit: Unit, batch: Any) -> AbstractContextManager[Any] | None:
        return self._parallel_loss() if self.config.loss_parallel else None

    @contextmanager
    def _parallel_loss(self) -> Iterator[None]:
        before, self._loss_is_parallel = self._loss_is_parallel, True
        try:
            with loss_parallel():
                yield
        finally:
            self._loss_is_parallel = before

    def _require_context(self, module: nn.Module, inputs: Any) -> None:
        if not self._loss_is_parallel and torch.is_grad_enabled():
            raise AccelError(
                "tensor-parallel.loss_parallel: this forward is outside the context in which losses of split"
                " logits are computed\n"
                "use accelerator.accumulate(model, batch=batch), or accelerator.forward_backward"
            )

    def _whole_without_gradient(self, module: nn.Module, inputs: Any, logits: Any) -> Any:
        # An evaluation computes its loss as any program does. Collective over `tp`.
        is_split = isinstance(logits, DTensor) and not self._loss_is_parallel
        return logits.full_tensor() if is_split and not torch.is_grad_enabled() else logits


class _Same(torch.autograd.Function):
    """The same storage, but no view of another tensor."""

    @staticmethod
    def forward(_: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient


def _give_no_views(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    # A local part is a view of its DTensor, which torch refuses to change in place (Llama 4 adds experts to
    # it), or which would lose the hook that gathers the weights for backward.
    def same(tensor: Tensor) -> Tensor:
        own = tensor._base is None or not tensor.requires_grad
        return tensor if own else _Same.apply(tensor)  # type: ignore[no-untyped-call]

    return tree_map_only(torch.Tensor, same, outputs)


def _ties(model: nn.Module) -> dict[tuple[nn.Module, str], tuple[nn.Module, str]]:
    """Second name of a tied parameter -> its first."""
    first: dict[nn.Parameter, tuple[nn.Module, str]] = {}
    again = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and first.setdefault(parameter, (module, key)) != (module, key):
                again[module, key] = first[parameter]
    return again


def _frozen(model: nn.Module) -> list[tuple[nn.Module, str]]:
    return [
        (module, key)
        for module in model.modules()
        for key, parameter in module._parameters.items()
        if parameter is not None and not parameter.requires_grad
    ]


def _draw_without_agreement(mesh: DeviceMesh) -> None:
    # Torch's own tracker, made by the first random operator on a DTensor, would give the whole world rank 0's
    # stream, in a collective that other pipeline stages may never come to. The unit's stream is one along tp.
    supported = mesh.device_type != "cpu" and tracking.is_rng_supported_mesh(mesh)
    if supported and tracking._rng_tracker is None:
        tracking._rng_tracker = tracking.OffsetBasedRNGTracker(mesh, run_state_sync=False)


def _agree(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Give all ranks the weights and buffers of the first rank, except the parts of split layers."""
    tensors = (*model.parameters(), *model.buffers())
    send_weights([each for each in tensors if not each.is_meta and not isinstance(each, DTensor)], [group])

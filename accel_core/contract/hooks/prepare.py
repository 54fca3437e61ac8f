# mypy: disable-error-code="empty-body"
"""The hooks that `Accelerator()` and `prepare` call: further decisions of a strategy or an extension."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

from accel_core.contract.bound import concatenate, enter
from accel_core.contract.spec import spec

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from accel_core.contract.config import RunConfig
    from accel_core.contract.data import DataSource
    from accel_core.contract.mesh import Mesh, MeshDim
    from accel_core.contract.unit import Unit
    from accel_core.contract.world import Collectives, Topology, World

PHASES: Final = ("quantize", "convert", "parallelize", "checkpoint", "compile", "post")
"""Phases of `transform_model`, in order.

`place_model` and `wrap_model` run between the last two.
"""


# -- a run, on all ranks -----------------------------------------------------------------------------


@spec("observer", concatenate)
def refuse(config: RunConfig) -> Sequence[str]:
    """Return reasons why this stack cannot run with this config; each reason names a remedy."""


@spec("everyone", concatenate)
def mesh_dims(config: RunConfig, world: World) -> Sequence[MeshDim]:
    """Return the dimensions along which this plugin divides the ranks. The same on all ranks."""


@spec("owner")
def build_mesh(dims: Sequence[MeshDim], world: World) -> Mesh | None:
    """Return the mesh of the dimensions that all plugins declare. Collective.

    base: None without dimensions and in a world of one (sizes that do not fit it are refused); else torch's
    `init_device_mesh` over all ranks, in the order and sizes that `arrange` gives. A plugin that drives
    several devices per process builds the mesh over its devices. `Mesh.topology()` divides data and losses
    over ranks; without a mesh each rank reads.
    """


@spec("owner")
def collectives(dim: str) -> Collectives:
    """Return collectives over `dim`; `group` is torch's process group. Cached.

    `dim` is "world", "control" (always CPU tensors), "alone" (this rank), a dimension of the run's mesh, or
    several dimensions joined by "+", outermost first. Called on all ranks in the same order.
    """


# -- a unit, on all ranks ----------------------------------------------------------------------------


@spec("everyone", concatenate)
def refuse_unit(unit: Unit, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> Sequence[str]:
    """Return reasons why the unit, which may be new and empty, cannot take in these objects.

    Called with all objects of a `prepare` before anything is changed; each reason names a remedy.
    """


@spec("everyone", enter)
def model_init_context(unit_name: str | None) -> AbstractContextManager[Any] | None:
    """Return a context for building large models: on the meta device, or in parts.

    Entered on all ranks by `accelerator.model_init_context`, before the unit is prepared; may be collective.
    `unit_name` is None if the unit has no name yet. `wrap_model` fills in the weights that the context leaves
    out.
    """


@spec("wrapper")
def transform_model(unit: Unit, model: nn.Module, phase: str) -> nn.Module:
    """Change the model in one of `PHASES`, in place or by returning another.

    Called once per model and phase: with the user's model up to `compile`, on the device it comes from;
    in `post` with the result of `wrap_model`. Optimizers of the same `prepare` are in the unit already.
    Tensors that stay the same objects keep the names of the user's model, and optimizers follow a tensor
    that is replaced under its name. base compiles, as section `compile` says.
    """


@spec("owner")
def place_model(unit: Unit, model: nn.Module, device: torch.device) -> nn.Module:
    """Move the model's parameters and buffers. base: `model.to(device)`."""


def _uppermost(hook: str, answers: Sequence[tuple[str, DataSource]]) -> DataSource | None:
    return answers[-1][1] if answers else None


@spec("everyone", _uppermost)
def data_source(loader: Any, topology: Topology, already_sharded: bool | None) -> DataSource | None:
    """Return how a library's loader gives this rank its data; None for loaders of other libraries.

    Called with each dataloader of a `prepare`, on all ranks. A class of loaders that is no
    `torch.utils.data.DataLoader` must be in `prepares` of the card. Raise ConfigError if the data is divided
    between other readers than `topology` has. The uppermost plugin that answers is taken. `already_sharded`
    is what the program says, None if it says nothing.
    """


@spec("owner")
def wrap_dataloader(loader: Iterable[Any], topology: Topology) -> Iterable[Any]:
    """Return an iterable that moves a loader's batches to the device.

    Called for each iteration of a loader with workers, with this reader's batches on the host. Core does not
    call `mark_step` at the points in the iterable's attribute `marks`. Core moves the batches itself if the
    plugin returns `loader` (base).
    """


@spec("owner")
def prepare_unit(unit: Unit, loaders: Sequence[Any]) -> None:
    """Build an engine from all objects of the unit.

    Called instead of `place_model`, `wrap_model` and `wrap_optimizer`, in each `prepare` that adds to the
    unit, after the phases up to `compile`. The user's objects, new objects last, are in `unit.models`,
    `optimizers` (which hold the final parameters) and `schedulers`. Afterwards `unit.wrapped` has an entry
    per model; optimizers are replaced by the objects that per-step hooks get, and schedulers by the objects
    that are stepped and saved. Raise for late objects. base: each object by its own hooks.
    """


@spec("owner")
def unwrap_model(unit: Unit, model: nn.Module, keep_compiled: bool) -> nn.Module:
    """Return the user's module inside the module that `wrap_model` returned, or inside a copy of it.

    Any other module, which the unit may not have, is returned as it is.
    """


@spec("everyone")
def release(unit: Unit) -> None:
    """Drop ties to devices and process groups. Called also from `atexit`; must not raise."""


# -- around a forward --------------------------------------------------------------------------------


@spec("wrapper", per_step=True)
def place_batch(unit: Unit | None, batch: Any, device: torch.device) -> Any:
    """Return the user's batch as this rank needs it: the rank's part, padded, in the device's dtypes.

    Called for each batch of a prepared loader, after it was moved to the device, on the stream that computes,
    by all ranks alike. `unit` is the run's only unit; None if the run has several.
    """


@spec("everyone", enter, per_step=True)
def step_context(unit: Unit, batch: Any) -> AbstractContextManager[Any] | None:
    """Return a context around forward and backward of one micro-batch.

    Entered by calls that know the batch: `forward_backward`, evaluation included, and `accumulate` with
    `batch=`. A plugin that relies on it must raise if a forward runs outside it.
    """


@spec("everyone", enter)
def share_sequences(
    buffers: Sequence[Tensor], dims: Sequence[int], kept: Collection[Tensor]
) -> AbstractContextManager[Any] | None:
    """Return a context in which each tensor is this rank's part along its `dims`.

    Entered by `accelerator.maybe_context_parallel` around forward and backward of one micro-batch that no
    loader has split. Afterwards the tensors are whole again, except tensors in `kept`.
    """


@spec("owner")
def checkpoint_function(unit: Unit) -> Callable[..., Any]:
    """Return a function that calls another function, and calls it again in backward.

    The signature is `torch.utils.checkpoint.checkpoint`'s: a function and its arguments. For plugins that
    keep few activations. A precision whose contexts torch does not restore in backward returns a function of
    its own. base: torch's, not reentrant.
    """


# -- ranks that step alone, and copies of state ------------------------------------------------------


@spec("owner")
def join(units: Sequence[Unit], even_batches: bool | None) -> AbstractContextManager[Any]:
    """Return a context in which ranks may have different numbers of batches, or raise."""


@spec("everyone")
def average_parameters(unit: Unit) -> None:
    """Average over the topology's `loss_dim` the values of ranks that have stepped alone. Collective.

    Called by `LocalSGD` between steps, for strategies whose card offers `local_sgd`. base: trainable
    parameters.
    """

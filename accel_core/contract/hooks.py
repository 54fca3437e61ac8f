# mypy: disable-error-code="empty-body"
"""The contract between core and plugins: every hook, in the order in which a run meets them.

Kinds, stated by the decorator of each spec:

* `owner`: exactly one plugin does it, the topmost in layer order that implements it. Resolved
  once; its return value, None included, never decides who answers. Who wants the others' answer
  asks `self.below`, the same hooks resolved for the layers under the plugin.
* `everyone`: all plugins that implement it, bottom layer first. The return type says how answers
  combine: a Mapping merges (two answers for one key are an error), a Sequence concatenates,
  contexts and factories of contexts are entered bottom up, anything else must agree. None is no
  answer.
* `wrapper`: refines the argument named by the spec, inside out, and returns it.

Layers, bottom to top: base (core's defaults) < device < precision < strategy < extension, by slot.
Trackers implement observers only, extensions no owner hook.

Specs and implementations take plain parameters: no `*`, no defaults, no `**kwargs`. An
implementation may leave out parameters it does not need; new ones are only ever added. Per-step
hooks are bound once a unit, when it is prepared; no plugin manager stands in the way of a step.

The order of a step (only core counts; a window is the micro-batches of one optimizer step):

    `place_batch` -> `step_context` around forward under `autocast` and
    `backward(unit, loss, boundary, options)` -> at the boundary:
    `reduce_gradients` -> `unscale` -> `clip_grad_norm` | `clip_grad_value` -> `optimizer_step`
    -> `after_step(applied)` -> scheduler -> `zero_grad`
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Concatenate, Final, Literal, ParamSpec, TypeVar

import pluggy
from attrs import field, frozen

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import Tensor, nn
    from torch.amp import GradScaler
    from torch.optim import Optimizer

    from accel_core.contract.config import InitProcessGroupKwargs, RunConfig
    from accel_core.contract.mesh import Mesh, MeshDim
    from accel_core.contract.state import Entry, Json, Leaf, OptimizerState, TensorTemplate
    from accel_core.contract.unit import Unit
    from accel_core.contract.world import Collectives, Topology, World


P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

Kind = Literal["owner", "everyone", "wrapper"]
Point = Literal["batch", "backward", "step", "host_read", "state"]

_spec_marker = pluggy.HookspecMarker("accel_core")
_impl_marker = pluggy.HookimplMarker("accel_core")


@frozen
class Spec:
    """What a decorator below says of a hook; found on the function as `accel_spec`."""

    kind: Kind
    per_step: bool
    refines: str | None = None
    observer: bool = False


def owner(function: F) -> F:
    """Exactly one plugin does it."""
    return _declare(function, Spec("owner", per_step=False))


def owner_per_step(function: F) -> F:
    """Exactly one plugin does it, bound per unit and called each step."""
    return _declare(function, Spec("owner", per_step=True))


def everyone(function: F) -> F:
    """All plugins that implement it, bottom layer first."""
    return _declare(function, Spec("everyone", per_step=False))


def everyone_per_step(function: F) -> F:
    """All plugins that implement it, bound per unit and called each step."""
    return _declare(function, Spec("everyone", per_step=True))


def wrapper(argument: str) -> Callable[[F], F]:
    """All plugins that implement it refine `argument`, bottom layer innermost, and return it."""
    return lambda function: _declare(function, Spec("wrapper", per_step=False, refines=argument))


def wrapper_per_step(argument: str) -> Callable[[F], F]:
    """As `wrapper`, called each step."""
    return lambda function: _declare(function, Spec("wrapper", per_step=True, refines=argument))


def observer(function: F) -> F:
    """All plugins that implement it, trackers included."""
    return _declare(function, Spec("everyone", per_step=False, observer=True))


def _declare(function: F, spec: Spec) -> F:
    function.accel_spec = spec  # type: ignore[attr-defined]
    return _spec_marker(function)


def implements(
    spec: Callable[P, R],
) -> Callable[[Callable[Concatenate[Any, P], R]], Callable[Concatenate[Any, P], R]]:
    """Mark a method as the implementation of `spec`: `@implements(hooks.wrap_model)`.

    A type checker then compares name, parameters and types with the spec. At run time an
    implementation may have fewer parameters than the spec.
    """

    def mark(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
        return _impl_marker(specname=spec.__name__)(method)

    return mark


# -- before torch: implemented by the card's `launch` class or by a launcher --------------------


@frozen(kw_only=True)
class Job:
    """What a launcher starts. Picklable."""

    argv: tuple[str, ...]
    """The command of one worker, interpreter included."""
    nodes: int = 1
    node_rank: int = 0
    processes_per_node: int = 1
    rendezvous: str | None = None
    """host:port of node 0; None on a single node (a free port of 127.0.0.1 is taken)."""
    max_restarts: int = 0
    min_nodes: int | None = None
    """With how many nodes to start, or go on where some are lost; None: with all."""
    environment: Mapping[str, str] = field(factory=dict)
    """What each worker gets on top of this process's environment."""


@everyone
def launch_environment(config: RunConfig, world: World) -> Mapping[str, str]:
    """Variables that vendor libraries read when they are imported.

    Called in the launcher, and by the run before vendor imports (so that plain python and torchrun
    get them too). An unset variable is set; one that the user set otherwise is kept, and said.
    `world` is a guess in the launcher. Must not import torch.
    """


@owner
def visible_devices(config: RunConfig) -> tuple[str, int]:
    """(variable that masks devices, how many this machine has). Launcher; must not import torch."""


@owner
def launch(job: Job) -> int:
    """Start the job's workers on this node, wait, and return the exit code.

    Launcher slot only. Reports the first failing rank once; leaves no orphan behind on SIGINT or
    SIGTERM. Raises LaunchError where the workers cannot be started.
    """


@owner
def launch_function(function: Callable[..., Any], args: tuple[Any, ...], job: Job) -> Sequence[Any]:
    """Run `function(*args)` in `job.processes_per_node` workers of this machine.

    Launcher slot only. Returns what each rank returned, in rank order; raises LaunchError with the
    first failing rank's traceback.
    """


# -- set-up: once a run, all ranks ---------------------------------------------------------------


@owner
def select_device(world: World) -> torch.device:
    """The device of this process, made current. Raises where `local_rank` has none.

    base: the card's torch device type, index `local_rank`.
    """


@owner
def seed(seed: int, topology: Topology) -> None:
    """Seed python's, numpy's, torch's and the device's generators of this process."""


@owner
def capabilities(device: torch.device) -> frozenset[str]:
    """What this very chip can do, in capability words. The card's `offers` is the upper bound."""


@owner
def communication_backend(device: torch.device) -> Mapping[str, str]:
    """Torch device type -> name of the torch.distributed backend. Core adds one for the CPU."""


@owner
def init_process_group(world: World, backends: Mapping[str, str], options: InitProcessGroupKwargs) -> bool:
    """Make the default process group; True if this call did. Collective, worlds of two and more.

    Never called where a group exists: core adopts that one. base: torch's rendezvous, under a store
    prefix of its own per restart attempt and per group made in this process.
    """


@owner
def destroy_process_group() -> None:
    """Undo `init_process_group`, after the last run of the process that uses the group."""


@everyone
def mesh_dims(config: RunConfig, world: World) -> Sequence[MeshDim]:
    """Dimensions that this plugin divides the ranks along. The same on all ranks."""


@owner
def build_mesh(dims: Sequence[MeshDim], world: World) -> Mesh | None:
    """The mesh of the dimensions declared by all. Collective.

    base: None where nobody declares any, and in a world of one (sizes that do not fit it are refused);
    else torch's `init_device_mesh` over all ranks, in the order and sizes that `arrange` gives.
    Who drives several devices from a process arranges them over those.
    """


@owner
def data_topology(mesh: Mesh | None, world: World) -> Topology:
    """Who reads which data and reduces which loss. base: `mesh.topology()`; without one, every rank reads."""


@owner
def collectives(dim: str) -> Collectives:
    """Collectives over `dim`: "world", "control" (always CPU tensors), "alone" (this rank), a dimension of
    the run's mesh, or several of them joined by "+", outermost first.

    Cached by core, a dim. Called on all ranks in the same order.
    """


DUTIES: Final = ("precision", "accumulation", "clipping", "optimizer", "schedule", "placement", "data_order")
"""What a plugin may take over from the run altogether."""


@everyone
def owns(config: RunConfig) -> Sequence[str]:
    """The duties this plugin takes over with this config. Two claims of one in a unit are refused."""


@observer
def refuse(config: RunConfig) -> Sequence[str]:
    """Reasons why this stack cannot run with this config, each saying what to change."""


# -- prepare: once a unit, all ranks -------------------------------------------------------------

PHASES: Final = ("quantize", "convert", "parallelize", "checkpoint", "compile", "post")
"""Of `transform_model`, in order; `place_model` and `wrap_model` stand between the last two."""


@owner
def kind_of(object: object) -> Literal["model", "optimizer", "scheduler", "dataloader"] | None:
    """What an object given to `prepare` is; ask `below` for what you do not know. None is an error.

    base: torch's Module, Optimizer, LRScheduler and ReduceLROnPlateau, DataLoader.
    """


@everyone
def refuse_unit(unit: Unit, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> Sequence[str]:
    """Reasons why the unit cannot take in these objects, each saying what to change.

    Asked of all that one `prepare` was given before anything is changed. The unit may be new and empty.
    """


@everyone
def model_init_context(unit_name: str | None) -> AbstractContextManager[Any] | None:
    """Where the user builds models that are too large to be built whole: on the meta device, in parts.

    Entered by `accelerator.model_init_context`, before the unit (whose name is None, if not yet known) is
    prepared, on all ranks; may be collective. What it leaves out, `wrap_model` has to make good.
    """


@wrapper("model")
def transform_model(unit: Unit, model: nn.Module, phase: str) -> nn.Module:
    """Change the model in one of `PHASES`, in place or by giving another; as it is in all others.

    Called once a model and phase: with the user's model up to `compile`, on the device it comes from;
    in `post` with what `wrap_model` returned. Optimizers of the same `prepare` are in the unit already.
    Names are kept: tensors that are the same objects under other names keep those of the user's model,
    and optimizers follow what is replaced under its name.
    base compiles, as section `compile` says.
    """


@everyone
def compile_options() -> Mapping[str, Any]:
    """Arguments of `torch.compile` for what section `compile` leaves open; `backend` for backend `auto`."""


@owner
def place_model(unit: Unit, model: nn.Module, device: torch.device) -> nn.Module:
    """Move the model's parameters and buffers to the device. base: `model.to(device)`."""


@owner
def wrap_model(unit: Unit, model: nn.Module) -> nn.Module:
    """The module the user trains with. base: the user's own object, unwrapped.

    A strategy whose forward alone needs all ranks sets `unit.gathers`: then a rank that has more
    batches than others is told, in evaluation too, instead of waiting for them.
    """


@owner
def wrap_optimizer(unit: Unit, optimizer: Optimizer) -> Optimizer:
    """The optimizer that per-step hooks get. Its groups already hold the final parameters.

    base: the user's own object. What the user gets from `prepare` is core's proxy around it.
    The user's schedulers keep the optimizer that they were made with. An optimizer that replaces it shares
    its `param_groups` list, so that a scheduler's new rate reaches both; `wrap_scheduler` serves all others.
    """


@owner
def wrap_dataloader(loader: Iterable[Any], topology: Topology) -> Iterable[Any]:
    """What brings a prepared loader's batches to the device, instead of core.

    Called each time that such a loader is iterated, with this reader's batches on the host; only for
    loaders with workers, as another thread may read on ahead of the user. The points in an attribute
    `marks` of what it returns are left to it by `mark_step`. base: nobody; core moves batch by batch.
    """


@owner
def unwrap_model(unit: Unit, model: nn.Module, keep_compiled: bool) -> nn.Module:
    """The user's module inside what `wrap_model` returned."""


@owner
def wrap_scheduler(unit: Unit, scheduler: Any) -> Any:
    """The scheduler that is stepped, saved and restored. base: the user's own object."""


@owner
def complete(config: Any, unit: Unit, loaders: Sequence[Any]) -> Any:
    """The strategy's config with what is known only now filled in; kept as `unit.config`.

    Called in each `prepare` that adds to the unit, when its models, optimizers and schedulers are there,
    untransformed. `loaders`: the dataloaders of this call. base: the config as it is.
    """


@owner
def prepare_unit(unit: Unit, loaders: Sequence[Any]) -> None:
    """Make one thing of all that the unit has, as engines do: in place of place, wrap_model, wrap_optimizer.

    Called in each `prepare` that adds to the unit, after the phases up to `compile`, with the user's
    objects, new ones last, in `unit.models`, `optimizers` (which hold the final parameters) and
    `schedulers`. Afterwards `unit.wrapped` has an entry for each model; optimizers are replaced by those
    that per-step hooks get. Who cannot take a late object raises, and says how to prepare in one call.
    base: each object by its own hooks.
    """


@everyone
def release(unit: Unit) -> None:
    """Drop what binds the unit to devices and process groups. Also from `atexit`; must not raise."""


# -- each step, in this order --------------------------------------------------------------------


@wrapper_per_step("batch")
def place_batch(unit: Unit | None, batch: Any, device: torch.device) -> Any:
    """What the user gets for this batch: a rank's part of it, padded, in types the device can hold.

    Called for each batch of a prepared loader, after it was moved to the device, on the stream that
    computes, by all ranks alike. `unit`: the run's, where it has just one.
    """


@everyone_per_step
def step_context(unit: Unit, batch: Any) -> AbstractContextManager[Any] | None:
    """A context around forward and backward of one micro-batch, of which `batch` is the placed batch.

    Entered where the batch is known: in `forward_backward`, evaluation included, and in
    `accumulate(model, batch=...)`. Who depends on it must notice a forward without it, and say so.
    """


@everyone
def share_sequences(
    buffers: Sequence[Tensor], dims: Sequence[int], kept: Collection[Tensor]
) -> AbstractContextManager[Any] | None:
    """A context in which each of these tensors is, in place, this rank's part along its dimension of `dims`.

    Entered by `accelerator.maybe_context_parallel` around forward and backward of one micro-batch that no
    loader has shared out. Afterwards the tensors are whole again, but for those in `kept`.
    """


@everyone
def autocast(unit: Unit) -> Callable[[], AbstractContextManager[Any]] | None:
    """A factory of the context around each forward of the unit's models, or None.

    Called when the unit is bound; the factories are composed bottom up and entered each forward.
    """


@owner_per_step
def backward(unit: Unit, loss: Tensor, boundary: bool, options: Mapping[str, Any]) -> None:
    """Compute gradients of `loss` (0-dim, already divided by the window's size).

    `boundary`: the window's last. `options` go to torch: retain_graph, create_graph, inputs.
    base: `loss.backward(**options)`.
    """


@owner_per_step
def no_sync(unit: Unit, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
    """A context for forward and backward in which `models` (wrapped) do not reduce gradients."""


@frozen(kw_only=True)
class StepOutput:
    """What `forward_backward` gives: the mean loss of its micro-batches (0-dim, detached), or the sum of
    losses that are sums over items, whether this rank has it (pipelines: the last stage), and what
    `forward_loss` returned beside the loss.
    """

    loss: Tensor
    valid: bool = True
    outputs: tuple[Any, ...] = ()


@owner_per_step
def forward_backward(
    unit: Unit,
    batches: Iterator[Any],
    forward_loss: Callable[[nn.Module, Any], tuple[Tensor, Any]],
    microbatches: int | None,
    forward_only: bool,
) -> StepOutput:
    """Forward and backward of one window of `microbatches` batches; None: of `unit.window.size`, unless the
    strategy has an option of its own.

    The only form for units whose strategy owns the schedule, which takes `unit.whole_window`. Losses are
    divided by `unit.window.divisor`: 1 where they are sums over items. base: the plain loop.
    """


@owner_per_step
def reduce_gradients(unit: Unit, num_items: Tensor | None) -> None:
    """Reduce what backward left unreduced. Once a window, at the boundary, before unscale and clip.

    `num_items`: None where losses are means; where they are sums over items, the items of the whole
    window on all ranks with a loss of their own (0-dim, float32). Gradients averaged over those are then
    multiplied by `topology.losses` / num_items, as base does: who averages passes it on to `below`.
    """


@owner_per_step
def unscale(unit: Unit, optimizer: Optimizer) -> None:
    """Divide the optimizer's gradients by the loss scale. Core calls it once a window at most."""


@owner_per_step
def clip_grad_norm(
    unit: Unit, parameters: Sequence[nn.Parameter], max_norm: float, norm_type: float
) -> Tensor:
    """Clip to exactly this `max_norm`, or raise. Gives the total norm before clipping (0-dim)."""


@owner_per_step
def clip_grad_value(unit: Unit, parameters: Sequence[nn.Parameter], value: float) -> None:
    """Clamp each gradient to [-value, value], or raise."""


@owner_per_step
def optimizer_step(unit: Unit, optimizer: Optimizer, closure: Callable[[], Any] | None) -> bool:
    """Apply the optimizer; False if the step was skipped (overflow under a loss scale)."""


@everyone_per_step
def after_step(unit: Unit, optimizer: Optimizer, applied: bool) -> None:
    """After each optimizer step of the unit, once an optimizer."""


@owner_per_step
def zero_grad(unit: Unit, optimizer: Optimizer, set_to_none: bool) -> None:
    """Clear the optimizer's gradients, at the end of a window only."""


@owner
def grad_scaler(unit: Unit) -> GradScaler | None:
    """The unit's loss scaler, or None. Called once, when the unit is bound."""


@owner_per_step
def mark_step(point: Point) -> None:
    """The device may cut its lazily recorded graph here. The one per-step hook without a unit.

    Called after a batch is placed (batch), after backward, after an optimizer step (step), before
    core reads a tensor on the host (host_read), and before state is read (state).
    """


@owner
def join(units: Sequence[Unit], even_batches: bool | None) -> AbstractContextManager[Any]:
    """A context in which ranks may run out of batches at different times. Raises where it cannot."""


@owner
def average_parameters(unit: Unit) -> None:
    """Set the unit's trainable parameters to their mean over the topology's `loss_dim`. Collective.

    For `LocalSGD`, between steps. base: one all_reduce a dtype. Who holds no whole weights raises.
    """


# -- state ---------------------------------------------------------------------------------------


@owner
def model_state(unit: Unit) -> Mapping[str, Leaf]:
    """Canonical parameter or persistent buffer name -> leaf, its tensors views of the live storage.

    Every name on every rank: a leaf without shards where the tensor lives elsewhere. The weight is the
    most precise copy there is. Tied weights appear once (`unit.aliases`).
    """


@owner
def optimizer_state(unit: Unit, optimizer: Optimizer) -> OptimizerState:
    """The optimizer's state by canonical parameter name.

    A rank that holds no part of a parameter's state offers a leaf without shards for it, whose `replicated`
    equals that of the ranks that do.
    """


@owner
def refuse_optimizer_state(
    unit: Unit,
    optimizer: Optimizer,
    template: Mapping[str, Mapping[str, TensorTemplate]],
    plain: Mapping[str, Mapping[str, Json]],
) -> Sequence[str]:
    """Reasons why `materialize_optimizer_state` could not take this state, each in words for the user.

    Asked on every rank before a load touches anything; not collective. Arguments as there. A parameter
    that the checkpoint does not know is in neither: under `strict=False`, and where it was never stepped.
    Who steps several parameters as one completes such a parameter, or refuses. base: none.
    """


@owner
def materialize_optimizer_state(
    unit: Unit,
    optimizer: Optimizer,
    template: Mapping[str, Mapping[str, TensorTemplate]],
    plain: Mapping[str, Mapping[str, Json]],
) -> None:
    """Allocate state that does not exist yet, and take back what is no tensor: name -> key -> which.

    Afterwards `optimizer_state` must offer all of the template's leaves, without shards where other ranks
    hold the state; core copies into this rank's shards.
    """


@owner
def snapshot_safe(unit: Unit) -> bool:
    """Whether the tensors of the unit's leaves can be copied now, to be written while training goes on.

    Asked before a save that does not wait; where not (state that is on its way to another storage),
    that save is refused. base: True.
    """


@owner
def state_loaded(unit: Unit) -> None:
    """Weights and optimizer state were overwritten in place: refresh masters, scales, graphs."""


@everyone
def save_state(unit: Unit) -> Mapping[str, Entry]:
    """What the plugin itself must remember (scales, counters; never weights). Kept under its name."""


@everyone
def load_state(unit: Unit, entries: Mapping[str, Entry]) -> None:
    """Take back what this plugin's `save_state` gave."""


@everyone
def rng_state() -> Mapping[str, Tensor]:
    """Generator stream -> its state, a uint8 CPU tensor. Streams: python, numpy, torch, devices."""


@everyone
def set_rng_state(streams: Mapping[str, Tensor]) -> None:
    """Restore the streams that this plugin's `rng_state` names; raise for one that cannot be."""


@owner
def full_parameters(unit: Unit, names: Sequence[str], writeback: bool) -> AbstractContextManager[Any]:
    """A context in which the parameters of these canonical names are whole, in the user's own modules.

    Collective. `writeback`: what is written to them inside is kept. base: they are whole already.
    """


@owner
def iter_weights(
    unit: Unit, dtype: torch.dtype | None, to: torch.device | None
) -> Iterator[tuple[str, Tensor]]:
    """Canonical name -> whole parameter or persistent buffer, one after the other, tied weights once.

    Collective: all ranks read it to its end. Holds a few weights at a time, never the model. `dtype`: of
    floating-point ones. `to`: a device; None: where it costs least. base: the model's own tensors.
    """


# -- device services -----------------------------------------------------------------------------


@owner
def synchronize(device: torch.device) -> None:
    """Wait for all work on the device."""


@owner
def memory_stats(device: torch.device) -> Mapping[str, int]:
    """Bytes: allocated, reserved, peak, total. Keys that cannot be known are left out."""


@owner
def empty_cache() -> None:
    """Give unused cached device memory back."""


@owner
def set_affinity(world: World) -> None:
    """Pin this process to the CPUs nearest its device."""


@owner
def move(tree: Any, device: torch.device, non_blocking: bool) -> Any:
    """The same nested structure with its tensors on the device."""


# -- observers and helpers -----------------------------------------------------------------------


@observer
def run_started(run_id: str, config: RunConfig) -> None:
    """The run is up on this rank."""


@observer
def checkpoint_committed(folder: Path, step: int | None) -> None:
    """A save has become the checkpoint `folder`. Every rank, main thread.

    After a save that waits, at once; else when the rank next saves, waits for the checkpoint, or ends.
    """


@observer
def tracking_started(project: str, config: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """`init_trackers` was called: open the project, and note `config` (nested; any values, None too).

    This and `log` are called on the main process, and on all ranks of a plugin whose attribute
    `main_process_only` is False. `options`: what `init_kwargs` holds under the plugin's name.
    """


@observer
def log(values: Mapping[str, Any], step: int | None, options: Mapping[str, Any]) -> None:
    """`accelerator.log` was called, after `tracking_started`. Raise for what cannot be logged.

    `values`: mappings may be nested; tensors of one element have become numbers. `options`: what
    `log_kwargs` holds under the plugin's name.
    """


@observer
def run_ended() -> None:
    """`end_training` was called, or the process exits."""


@everyone
def environment_report() -> Mapping[str, str]:
    """Lines for `accel env`: what -> found. Called in any process; must not raise."""


@everyone
def profiler_activities() -> Sequence[str]:
    """What `accelerator.profile()` records unless told: names of torch.profiler's activities.

    base: the CPU, and the run's device where torch's profiler knows it.
    """

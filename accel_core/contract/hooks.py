# mypy: disable-error-code="empty-body"
"""The contract between core and plugins: every hook, in the order of a run.

Each hook has a kind:

* `owner`: exactly one plugin does it, the topmost in layer order that implements it. Core resolves the
  owner once; the returned value, None included, never decides which plugin answers. To call the next
  implementation down, a plugin uses `self.below`: the same hooks resolved for the layers under it.
* `everyone`: all plugins that implement it, bottom layer first. The return type says how answers combine:
  a Mapping merges (two answers for one key are an error), a Sequence concatenates, contexts and factories
  of contexts are entered bottom up, anything else must agree. None is not an answer.
* `wrapper`: each plugin refines the first parameter after `unit`, bottom layer innermost, and returns it.

Layers, bottom to top: base (core's defaults) < device < precision < strategy < extension, by slot.
Trackers implement observers only, extensions no owner hook.

Hooks and implementations take plain parameters: no `*`, no defaults, no `**kwargs`. An implementation may
leave out some of them; later versions only add more. Per-step hooks are bound once per unit, by `prepare`.

The order of a step (only core counts; a window is the micro-batches of one optimizer step):

    `place_batch` -> `step_context` around forward under `autocast` and
    `backward(unit, loss, boundary, options)` -> at the boundary:
    `reduce_gradients` -> `unscale` -> `clip_grad_norm` | `clip_grad_value` -> `optimizer_step`
    -> `after_step(applied)` -> scheduler -> `zero_grad`
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final, Literal

from accel_core.contract.spec import implements as implements  # noqa: PLC0414  beside the hooks, for plugins
from accel_core.contract.spec import spec

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import Tensor, nn
    from torch.amp import GradScaler
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from accel_core.contract.config import InitProcessGroupKwargs, LaunchConfig, RunConfig
    from accel_core.contract.job import Allocation, Job, SubmittedJob
    from accel_core.contract.mesh import Mesh, MeshDim
    from accel_core.contract.state import Entry, Json, Leaf, OptimizerState, TensorTemplate
    from accel_core.contract.unit import StepOutput, Unit
    from accel_core.contract.world import Collectives, Topology, World
    from accel_core.storage.protocols import Storage

Point = Literal["batch", "backward", "step", "host_read", "state"]
PreparedKind = Literal["model", "optimizer", "scheduler", "dataloader"]

# -- before torch: implemented by the card's `launch` class or by a launcher --------------------


@spec("everyone", asked="launch class")
def launch_environment(config: RunConfig, world: World) -> Mapping[str, str]:
    """Variables that vendor libraries read when they are imported.

    Called in the launcher, where `world` is a guess, and by the run before vendor imports, under any
    launcher. Must not import torch. Core sets unset variables; a user's own value stays, and core says so.
    """


@spec("owner", asked="launch class")
def visible_devices(config: RunConfig) -> tuple[str, int | None]:
    """(variable that masks devices, their number on this machine), without torch.

    The number is None if no file tells it; core then asks torch.
    """


@spec("owner", asked="launcher")
def launch(job: Job) -> int:
    """Start the job's workers, wait, and return the exit code.

    Launchers only. The code is that of the first rank that fails, which is reported once. Workers' output
    appears as it comes, in whole lines. SIGINT and SIGTERM end all workers. `accel launch` runs on each node,
    unless the launcher starts it there.
    """


@spec("owner", asked="launcher")
def allocation(launch: LaunchConfig) -> Allocation | None:
    """Return the machines that the launcher's engine has given to this process.

    None outside of a job. Launchers only; `launcher: auto` takes the first that answers. A launcher that
    is named, and starts workers on other machines, answers with `elsewhere=True`. Raises LaunchError if
    `launch` asks for other machines.
    """


@spec("owner", asked="launcher")
def submit(job: Job) -> SubmittedJob:
    """Hand `job.command` to an engine that runs it later, and return at once.

    Launchers only.
    """


@spec("owner", asked="launcher")
def preview(job: Job, submits: bool) -> str:
    """Return the commands and files of `submit`, or else of `launch`, as text.

    Launchers only, for `--dry-run`: nothing is started or sent.
    """


@spec("owner", asked="launcher")
def launch_function(function: Callable[..., Any], args: tuple[Any, ...], job: Job) -> Sequence[Any]:
    """Run `function(*args)` in `job.processes_per_node` workers of this machine.

    Launchers only. Returns each rank's value, in rank order; LaunchError has a failing rank's traceback.
    """


# -- set-up: once per run, all ranks -------------------------------------------------------------


@spec("owner")
def select_device(world: World) -> torch.device:
    """Return the device of this process, made current.

    Raises if `local_rank` has none. base: the card's torch device type, index `local_rank`.
    """


@spec("owner")
def seed(seed: int, topology: Topology) -> None:
    """Seed python's, numpy's, torch's and the device's generators of this process."""


@spec("owner")
def capabilities(device: torch.device) -> frozenset[str]:
    """Capability words of this chip under this stack; at most the card's `offers`.

    A strategy narrows the device's answer: `self.below.capabilities(device) - {"fp16"}`. If a plugin of the
    stack needs a missing word, core refuses the stack, and names the layer that removed the word.
    """


@spec("owner")
def communication_backend(device: torch.device) -> Mapping[str, str]:
    """Torch device type -> torch.distributed backend. Core adds one for the CPU."""


@spec("owner")
def init_process_group(world: World, backends: Mapping[str, str], options: InitProcessGroupKwargs) -> bool:
    """Make the default process group; True if this call did. Collective.

    Called in a world of two or more ranks that has no group yet; core adopts an existing group. base: torch's
    rendezvous, with a store prefix per restart attempt and per group made in this process.
    """


@spec("owner")
def destroy_process_group() -> None:
    """Undo `init_process_group`, after the last run that uses the group."""


@spec("everyone")
def mesh_dims(config: RunConfig, world: World) -> Sequence[MeshDim]:
    """Dimensions that this plugin divides the ranks along. The same on all ranks."""


@spec("owner")
def build_mesh(dims: Sequence[MeshDim], world: World) -> Mesh | None:
    """Return the mesh of the dimensions that all plugins declare. Collective.

    base: None without dimensions and in a world of one (sizes that do not fit it are refused); else torch's
    `init_device_mesh` over all ranks, in the order and sizes that `arrange` gives. A plugin that drives
    several devices per process builds the mesh over those devices.
    """


@spec("owner")
def data_topology(mesh: Mesh | None, world: World) -> Topology:
    """Division of data and losses over ranks. base: the mesh's, else all ranks read."""


@spec("owner")
def collectives(dim: str) -> Collectives:
    """Return collectives over `dim`; `group` is torch's process group. Cached.

    `dim`: "world", "control" (always CPU tensors), "alone" (this rank), a dimension of the run's mesh, or
    several joined by "+", outermost first. Called on all ranks in the same order.
    """


DUTIES: Final = ("precision", "accumulation", "clipping", "optimizer", "schedule", "placement", "data_order")
"""Duties that a plugin may take over from the run altogether."""


@spec("everyone")
def owns(config: RunConfig) -> Sequence[str]:
    """Return the duties this plugin takes over; a unit has one claim of each."""


@spec("observer")
def refuse(config: RunConfig) -> Sequence[str]:
    """Reasons why this stack cannot run with this config, each saying what to change."""


# -- prepare: once per unit, all ranks -----------------------------------------------------------

PHASES: Final = ("quantize", "convert", "parallelize", "checkpoint", "compile", "post")
"""Phases of `transform_model`, in order.

`place_model` and `wrap_model` run between the last two.
"""


@spec("owner")
def kind_of(object: object) -> PreparedKind | None:
    """Kind of an object given to `prepare`; None is an error.

    Ask `below` about other objects. base: torch's Module, Optimizer, LRScheduler, DataLoader.
    """


@spec("everyone")
def refuse_unit(unit: Unit, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> Sequence[str]:
    """Reasons why the unit, which may be new and empty, cannot take in these objects.

    Asked about all objects of a `prepare` before anything is changed; each reason says what to change.
    """


@spec("everyone")
def model_init_context(unit_name: str | None) -> AbstractContextManager[Any] | None:
    """Return a context for building large models: on the meta device, or in parts.

    Entered by `accelerator.model_init_context` before the unit (None: not named yet) is prepared, on all
    ranks; may be collective. `wrap_model` fills in the weights that the context leaves out.
    """


@spec("wrapper")
def transform_model(unit: Unit, model: nn.Module, phase: str) -> nn.Module:
    """Change the model in one of `PHASES`, in place or by returning another.

    Called once per model and phase: with the user's model up to `compile`, on the device it comes from;
    in `post` with the result of `wrap_model`. Optimizers of the same `prepare` are in the unit already.
    Tensors that stay the same objects keep the names of the user's model, and optimizers follow a tensor
    that is replaced under its name. base compiles, as section `compile` says.
    """


@spec("everyone")
def compile_options() -> Mapping[str, Any]:
    """Arguments of `torch.compile` that section `compile` leaves unset or `auto`."""


@spec("owner")
def place_model(unit: Unit, model: nn.Module, device: torch.device) -> nn.Module:
    """Move the model's parameters and buffers. base: `model.to(device)`."""


@spec("owner")
def wrap_model(unit: Unit, model: nn.Module) -> nn.Module:
    """Return the module the user trains with. base: the user's own object, unwrapped.

    A plugin whose forward alone needs all ranks calls `unit.set_forward_is_collective()`: a rank that has
    more batches than others then raises instead of waiting for them, in evaluation too.
    """


@spec("owner")
def wrap_optimizer(unit: Unit, optimizer: Optimizer) -> Optimizer:
    """Return the optimizer for per-step hooks; its groups hold final parameters.

    base: the user's own object. Schedulers keep the optimizer that they were made with: one that replaces
    it shares its `param_groups` list, so that a new rate reaches both, or `wrap_scheduler` replaces them.
    """


@spec("wrapper")
def transform_optimizer(unit: Unit, optimizer: Optimizer) -> Optimizer:
    """Wrap or change the optimizer that `wrap_optimizer` or `prepare_unit` made.

    A wrapper shares `param_groups` and `state` with the optimizer inside. Replacing an engine's optimizer
    (`prepare_unit`) is an error.
    """


@spec("owner")
def wrap_dataloader(loader: Iterable[Any], topology: Topology) -> Iterable[Any]:
    """Return an iterable that moves a loader's batches to the device.

    Called for each iteration of a loader with workers, with this reader's batches on the host. `mark_step`
    leaves out the points in the iterable's attribute `marks`. base: nothing; core moves batch by batch.
    """


@spec("owner")
def unwrap_model(unit: Unit, model: nn.Module, keep_compiled: bool) -> nn.Module:
    """Return the user's module inside what `wrap_model` returned, or a copy of it.

    Any other module, which the unit may not have, is returned as it is.
    """


@spec("owner")
def wrap_scheduler(unit: Unit, scheduler: Any) -> LRScheduler:
    """Return the scheduler that is stepped and saved. base: the user's object."""


@spec("owner")
def complete(config: Any, unit: Unit, loaders: Sequence[Any]) -> Any:
    """Return the strategy's config with values known now; kept as `unit.config`.

    Called in each `prepare` that adds to the unit, with its models, optimizers and schedulers there,
    untransformed. `loaders`: the dataloaders of this call. base: the config as it is.
    """


@spec("owner")
def prepare_unit(unit: Unit, loaders: Sequence[Any]) -> None:
    """Make an engine of all objects of the unit.

    Replaces `place_model`, `wrap_model` and `wrap_optimizer`, in each `prepare` that adds to the unit, after
    the phases up to `compile`. The user's objects, new ones last, are in `unit.models`, `optimizers` (which
    hold the final parameters) and `schedulers`. Afterwards `unit.wrapped` has an entry per model; optimizers
    are replaced by those that per-step hooks get. Raise for late objects. base: each by its own hooks.
    """


@spec("everyone")
def release(unit: Unit) -> None:
    """Drop ties to devices and process groups. Also from `atexit`; must not raise."""


# -- each step, in this order --------------------------------------------------------------------


@spec("wrapper", per_step=True)
def place_batch(unit: Unit | None, batch: Any, device: torch.device) -> Any:
    """Return the user's batch: a rank's part, padded, in the device's dtypes.

    Called for each batch of a prepared loader, after it was moved to the device, on the stream that
    computes, by all ranks alike. `unit`: the run's only one; None if it has several.
    """


@spec("everyone", per_step=True)
def step_context(unit: Unit, batch: Any) -> AbstractContextManager[Any] | None:
    """Return a context around forward and backward of one micro-batch.

    Entered where the batch is known: in `forward_backward`, evaluation included, and in
    `accumulate(model, batch=...)`. A plugin that relies on it must raise if a forward runs outside it.
    """


@spec("everyone")
def share_sequences(
    buffers: Sequence[Tensor], dims: Sequence[int], kept: Collection[Tensor]
) -> AbstractContextManager[Any] | None:
    """Return a context in which each tensor is this rank's part along its `dims`.

    Entered by `accelerator.maybe_context_parallel` around forward and backward of one micro-batch that no
    loader has split. Afterwards the tensors are whole again, except those in `kept`.
    """


@spec("everyone")
def autocast(unit: Unit) -> Callable[[], AbstractContextManager[Any]] | None:
    """Return a factory of the context around each forward, or None.

    Called when the unit is bound; the factories are composed bottom up and entered in each forward.
    """


@spec("owner")
def checkpoint_function(unit: Unit) -> Callable[..., Any]:
    """Return a function that calls another, and calls it again in backward.

    It is called as `torch.utils.checkpoint.checkpoint` is, with a function and its arguments. For plugins
    that keep few activations. A precision whose contexts torch does not restore in backward returns its
    own. base: torch's, not reentrant.
    """


@spec("owner", per_step=True)
def backward(unit: Unit, loss: Tensor, boundary: bool, options: Mapping[str, Any]) -> None:
    """Compute gradients of `loss` (0-dim, already divided by the window's size).

    `boundary`: whether this is the window's last micro-batch. `options` go to torch: retain_graph,
    create_graph, inputs. base: `loss.backward(**options)`.
    """


@spec("wrapper", per_step=True)
def transform_gradient(unit: Unit, gradient: Tensor, name: str) -> Tensor:
    """Read or change a parameter's gradient of one backward, before its reduction.

    Called once per backward, with the parameter's canonical name, under the loss scale. Needs a strategy
    that offers `local_gradients`; any other is refused in `prepare`.
    """


@spec("owner", per_step=True)
def no_sync(unit: Unit, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
    """Return a context in which `models` (wrapped) do not reduce gradients."""


@spec("owner", per_step=True)
def forward_backward(
    unit: Unit,
    batches: Iterator[Any],
    forward_loss: Callable[[nn.Module, Any], tuple[Tensor, Any]],
    microbatches: int | None,
    forward_only: bool,
) -> StepOutput:
    """Forward and backward of one window of `microbatches`. base: the plain loop.

    None means `unit.window.size`, or an option of the strategy. A strategy that owns the schedule trains by
    this hook only, and takes `unit.whole_window`. Each loss is divided by `unit.window.divisor`. Core calls
    it under `torch.no_grad()` where `forward_only` is True.
    """


@spec("owner", per_step=True)
def reduce_gradients(unit: Unit) -> None:
    """Average over ranks what backward left unreduced, once per window, at its boundary.

    Losses are divided before backward, also where they are sums over items. A unit without optimizers never
    calls it, so core refuses to train one. Of gradients that a loss's own `backward()` made, clip and step
    ask for it each: an average of averages is the average.
    """


@spec("owner", per_step=True)
def unscale(unit: Unit, optimizer: Optimizer) -> None:
    """Divide the optimizer's gradients by the loss scale, unless they are already.

    Core asks before each clip, and each time the user does.
    """


@spec("owner", per_step=True)
def clip_grad_norm(
    unit: Unit, parameters: Sequence[nn.Parameter], max_norm: float, norm_type: float
) -> Tensor:
    """Clip to exactly this `max_norm`, or raise; the total norm before (0-dim)."""


@spec("owner", per_step=True)
def clip_grad_value(unit: Unit, parameters: Sequence[nn.Parameter], value: float) -> None:
    """Clamp each gradient to [-value, value], or raise."""


@spec("owner", per_step=True)
def optimizer_step(unit: Unit, optimizer: Optimizer, closure: Callable[[], Any] | None) -> bool:
    """Apply the optimizer; False if the step was skipped, as after an overflow."""


@spec("everyone", per_step=True)
def after_step(unit: Unit, optimizer: Optimizer, applied: bool) -> None:
    """Follow an optimizer step of the unit; called once per optimizer."""


@spec("owner", per_step=True)
def zero_grad(unit: Unit, optimizer: Optimizer, set_to_none: bool) -> None:
    """Clear the optimizer's gradients, at the end of a window only."""


@spec("owner")
def grad_scaler(unit: Unit) -> GradScaler | None:
    """Return the unit's loss scaler, or None.

    A precision that scales the loss answers: with the device's own scaler, if it has one.
    """


@spec("owner")
def overflow_dim(unit: Unit) -> str | None:
    """Return the dimension along which ranks hold different gradients once they are reduced.

    They agree then whether an optimizer's gradients overflowed, so that all step, or none, and the loss
    scale is the same everywhere. base: None, as reduced gradients are the same on all ranks.
    """


@spec("owner", per_step=True)
def mark_step(point: Point) -> None:
    """Cut the device's lazily recorded graph here, if it has one.

    Called after a batch is placed (batch), after backward, after an optimizer step (step), before
    core reads a tensor on the host (host_read), and before state is read (state).
    """


@spec("owner")
def join(units: Sequence[Unit], even_batches: bool | None) -> AbstractContextManager[Any]:
    """Return a context in which ranks may have unequally many batches, or raise."""


@spec("owner")
def average_parameters(unit: Unit) -> None:
    """Average trainable parameters over the topology's `loss_dim`. Collective.

    For `LocalSGD`, between steps. base: one all_reduce per dtype. Only strategies whose card
    offers `local_sgd` are asked.
    """


@spec("everyone")
def parameters_averaged(unit: Unit) -> None:
    """Average over `loss_dim` what this plugin derives from the parameters.

    Collective. Called after `average_parameters`; before it, ranks have stepped alone.
    """


# -- state ---------------------------------------------------------------------------------------


@spec("owner")
def model_state(unit: Unit) -> Mapping[str, Leaf]:
    """Canonical name of parameter or persistent buffer -> leaf.

    Tensors are views of the live storage, of the most precise copy there is. Every name is on every rank: a
    leaf without shards if the tensor lives elsewhere. Tied weights appear once (`unit.aliases`).
    """


@spec("owner")
def optimizer_state(unit: Unit, optimizer: Optimizer) -> OptimizerState:
    """Return the optimizer's state by canonical parameter name.

    A rank without a part of a parameter's state offers a leaf without shards, `replicated` as elsewhere.
    """


@spec("owner")
def refuse_optimizer_state(
    unit: Unit,
    optimizer: Optimizer,
    template: Mapping[str, Mapping[str, TensorTemplate]],
    plain: Mapping[str, Mapping[str, Json]],
) -> Sequence[str]:
    """Reasons why `materialize_optimizer_state` could not take this state.

    Asked on every rank before a load touches anything; not collective. A parameter that the checkpoint
    does not know, or that was never stepped, is in neither argument; a strategy that steps several
    parameters as one completes such a parameter, or refuses. base: none.
    """


@spec("owner")
def materialize_optimizer_state(
    unit: Unit,
    optimizer: Optimizer,
    template: Mapping[str, Mapping[str, TensorTemplate]],
    plain: Mapping[str, Mapping[str, Json]],
) -> None:
    """Allocate state that does not exist yet, and take back plain values.

    Both by name and key. Afterwards `optimizer_state` must offer all of the template's leaves, without
    shards for state that other ranks hold; core copies into this rank's shards.
    """


@spec("owner")
def snapshot_safe(unit: Unit) -> bool:
    """Return True if the tensors of the unit's leaves can be copied now.

    Asked before a save that is written while training goes on; False refuses it. base: True.
    """


@spec("everyone")
def state_loaded(unit: Unit) -> None:
    """Refresh masters, scales and graphs: state was overwritten in place.

    Called on each plugin after the unit's weights and optimizers are loaded, before `load_state`.
    """


@spec("everyone")
def save_state(unit: Unit) -> Mapping[str, Entry]:
    """Return the plugin's own state: scales, counters, averages, never weights.

    A load calls this hook too, and copies into its leaves. If the checkpoint has none of the plugin's leaves,
    the plugin keeps its initial state, as after `state_loaded`: an extension may join a run later.
    """


@spec("everyone")
def load_state(unit: Unit, entries: Mapping[str, Entry]) -> None:
    """Take back what this plugin's `save_state` gave."""


@spec("everyone")
def rng_state() -> Mapping[str, Tensor]:
    """Return stream (python, numpy, torch, devices) -> state, a uint8 CPU tensor."""


@spec("everyone")
def set_rng_state(streams: Mapping[str, Tensor]) -> None:
    """Restore the streams that this plugin's `rng_state` names, or raise."""


@spec("owner")
def full_parameters(unit: Unit, names: Sequence[str], writeback: bool) -> AbstractContextManager[Any]:
    """Return a context in which the user's modules hold these parameters whole.

    Collective. `writeback`: keep changes made to them inside. base: they are whole already.
    """


@spec("owner")
def iter_weights(
    unit: Unit, dtype: torch.dtype | None, to: torch.device | None
) -> Iterator[tuple[str, Tensor]]:
    """(canonical name, whole parameter or persistent buffer), tied weights once.

    Collective: all ranks read it to its end. Holds a few weights at a time, never the model. `dtype`: of
    floating-point ones. `to`: a device; None: the cheapest one. base: the model's own tensors.
    """


# -- device services -----------------------------------------------------------------------------


@spec("owner")
def synchronize(device: torch.device) -> None:
    """Wait for all work on the device."""


@spec("owner")
def memory_stats(device: torch.device) -> Mapping[str, int]:
    """Bytes: allocated, reserved, peak, total, free; without those that are unknown.

    Of any device of the kind, not only of the run's. free: what can still be allocated, cached memory
    included.
    """


@spec("owner")
def device_specs(device: torch.device) -> Mapping[str, Json]:
    """Return the peaks of this chip as its vendor states them; empty if unknown.

    flops: dtype (float64, float32, bfloat16, float16 or float8) -> FLOP/s of dense matrix products, as the
    process is set up now. memory: bytes. bandwidth: bytes/s of that memory. source: the vendor's paper that
    has them. Leave out a figure that the vendor does not state. base: empty.
    """


@spec("owner")
def device_health(device: torch.device) -> Mapping[str, Json]:
    """Return the current readings of the chip's sensors; empty if it has none.

    temperature: degrees Celsius. power: watts. clock: MHz. busy: share of the last sampling interval in
    which the chip computed. throttled: reasons why its clock is reduced. memory_errors: uncorrected ones
    since its driver started. Leave out unknown readings. For the run's record, on its main process, once
    per second at most: it must neither wait nor raise. base: empty.
    """


@spec("owner")
def empty_cache() -> None:
    """Give cached memory that is not used back, the device's and the host's."""


@spec("owner")
def set_affinity(world: World) -> None:
    """Pin this process to the CPUs nearest its device."""


@spec("owner")
def move(tree: Any, device: torch.device, non_blocking: bool) -> Any:
    """Return the same nested structure with its tensors on the device."""


# -- places of checkpoints: implemented by stores, which live without a run ----------------------


@spec("owner", asked="store")
def open_storage(url: str) -> Storage:
    """Return the folder of this URL, which need not be there: see `accel_core.storage.protocols.Storage`.

    Raises CheckpointError for a URL that cannot be one.
    """


# -- observers and helpers -----------------------------------------------------------------------


@spec("observer")
def run_started(run_id: str, config: RunConfig) -> None:
    """Note that the run is up on this rank."""


@spec("observer")
def checkpoint_committed(folder: Path | str, step: int | None) -> None:
    """Note that a save has become the checkpoint `folder`. Every rank, main thread.

    A URL is text. Called at once after a save that waits; otherwise when the rank next saves, waits for the
    checkpoint, or ends.
    """


@spec("observer")
def save_run_state() -> Mapping[str, Json]:
    """Return state of the whole run, such as the id of a tracker's run.

    Checkpoints keep it under the plugin's name. Called on the main process. State of a unit belongs to
    `save_state`.
    """


@spec("observer")
def load_run_state(state: Mapping[str, Json]) -> None:
    """Take back the answer of this plugin's `save_run_state`.

    Called on every rank, also before `tracking_started`.
    """


@spec("observer")
def tracking_started(project: str, config: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Open the project for `init_trackers`, and note `config` (nested, any values).

    This hook and `log` are called on the main process, and on all ranks for a plugin whose attribute
    `main_process_only` is False. `options`: the entry of `init_kwargs` under the plugin's name.
    """


@spec("observer")
def log(values: Mapping[str, Any], step: int | None, options: Mapping[str, Any]) -> None:
    """Log for `accelerator.log`, or raise for values that cannot be logged.

    `values`: mappings may be nested; tensors of one element have become numbers. `options`: the entry of
    `log_kwargs` under the plugin's name.
    """


@spec("observer")
def run_ended() -> None:
    """Close what is open: `end_training` was called, or the process exits."""


@spec("everyone")
def describe(unit: Unit) -> Sequence[str]:
    """Return lines about the unit for `accelerator.explain()`.

    They say how `prepare` changed the unit, and why. Called after `prepare`, on any rank by itself; each
    string is one line.
    """


@spec("everyone")
def environment_report() -> Mapping[str, str]:
    """Lines for `accel env`, which asks devices: what -> found.

    Called in any process; must not raise.
    """


@spec("everyone")
def profiler_activities() -> Sequence[str]:
    """Names of torch.profiler's activities that `accelerator.profile()` records.

    base: the CPU, and the run's device if torch's profiler knows it.
    """

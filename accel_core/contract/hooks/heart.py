# mypy: disable-error-code="empty-body"
"""The hooks that carry a run: what a strategy or a precision implements first.

The order of a step (only core counts; a window is the micro-batches of one optimizer step):

    `place_batch` -> `step_context` around forward under `autocast` and
    `backward(unit, loss, boundary, options)` -> at the boundary:
    `reduce_gradients` -> `unscale` -> `clip_gradients` -> `optimizer_step`
    -> `after_step(applied)` -> scheduler -> `zero_grad`
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from accel_core.contract.bound import compose, merge
from accel_core.contract.spec import spec

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.amp import GradScaler
    from torch.optim import Optimizer

    from accel_core.contract.config import InitProcessGroupKwargs
    from accel_core.contract.state import Entry, Json, Leaf, OptimizerState, TensorTemplate
    from accel_core.contract.unit import StepOutput, Unit
    from accel_core.contract.world import World


# -- the five to begin with, and the second half of the fifth ----------------------------------------


@spec("owner")
def init_process_group(
    world: World, backends: Mapping[str, str], options: InitProcessGroupKwargs
) -> Callable[[], None]:
    """Make the default process group; return the function that ends it, after the last run that uses it.

    Collective. Called in a world of two or more ranks that has no group yet; core adopts an existing group.
    base: torch's rendezvous, with a store prefix per restart attempt and per group made in this process.
    """


@spec("owner")
def wrap_model(unit: Unit, model: nn.Module) -> nn.Module:
    """Return the module the user trains with. base: the user's own object, unwrapped.

    A plugin whose forward alone needs all ranks calls `unit.set_forward_is_collective()`: a rank that has
    more batches than others then raises instead of waiting for them, in evaluation too.
    """


@spec("wrapper")
def wrap_optimizer(unit: Unit, optimizer: Optimizer) -> Optimizer:
    """Return the optimizer for per-step hooks: this one, changed or not, or a wrapper.

    Its groups hold final parameters.
    A wrapper shares `param_groups` and `state` with the optimizer inside, so that a new rate reaches both.
    Replacing an engine's optimizer (`prepare_unit`) is an error.
    """


@spec("everyone", compose)
def autocast(unit: Unit) -> Callable[[], AbstractContextManager[Any]] | None:
    """Return a factory of the context around each forward, or None.

    Called when the unit is bound; the factories are composed bottom up and entered in each forward.
    """


@spec("everyone", merge)
def save_state(unit: Unit) -> Mapping[str, Entry]:
    """Return the plugin's own state: scales, counters, averages, never weights.

    A load calls this hook too, and copies into its leaves.
    """


@spec("everyone")
def load_state(unit: Unit, entries: Mapping[str, Entry]) -> None:
    """Take back what this plugin's `save_state` gave, and refresh masters, scales and graphs.

    Called on each plugin after the unit's weights and optimizers were overwritten in place. `entries` are
    empty where a checkpoint has none, as of an extension that joins later: begin anew then.
    """


# -- a step, in this order ---------------------------------------------------------------------------


@spec("owner", per_step=True)
def backward(unit: Unit, loss: Tensor, boundary: bool, options: Mapping[str, Any]) -> None:
    """Compute gradients of `loss` (0-dim, already divided by the window's size).

    `boundary`: whether this is the window's last micro-batch. `options` go to torch: retain_graph,
    create_graph, inputs. base: `loss.backward(**options)`.
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


@spec("owner")
def grad_scaler(unit: Unit) -> GradScaler | None:
    """Return the unit's loss scaler, or None.

    A precision that scales the loss answers: with the device's own scaler, if it has one.
    """


@spec("owner", per_step=True)
def unscale(unit: Unit, optimizer: Optimizer) -> None:
    """Divide the optimizer's gradients by the loss scale, unless they are already.

    Core asks before each clip, and each time the user does.
    """


@spec("owner", per_step=True)
def clip_gradients(
    unit: Unit, parameters: Sequence[nn.Parameter], limit: float, norm_type: float | None
) -> Tensor | None:
    """Clip gradients to exactly this norm, or raise; return the total norm before (0-dim).

    norm_type None: clamp each gradient to [-limit, limit] instead, or raise; there is no norm then.
    """


@spec("owner", per_step=True)
def optimizer_step(unit: Unit, optimizer: Optimizer, closure: Callable[[], Any] | None) -> bool:
    """Apply the optimizer; False if the step was skipped, as after an overflow."""


@spec("owner", per_step=True)
def zero_grad(unit: Unit, optimizer: Optimizer, set_to_none: bool) -> None:
    """Clear the optimizer's gradients, at the end of a window only."""


# -- a checkpoint ------------------------------------------------------------------------------------


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
    floating-point ones. `to`: a device, which may differ from rank to rank; None: the cheapest one. base: the
    model's own tensors.
    """

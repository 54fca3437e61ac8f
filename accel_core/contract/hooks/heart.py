# mypy: disable-error-code="empty-body"
"""The hooks that a strategy or a precision implements first.

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
    """Create the default process group; return the function that ends it after the last run that uses it.

    Collective. Called in a world of two or more ranks that has no group yet; core adopts an existing group.
    base: torch's rendezvous, with a store prefix per restart attempt and per group made in this process.
    """


@spec("owner")
def wrap_model(unit: Unit, model: nn.Module) -> nn.Module:
    """Return the module that the user trains with. base: the user's own object, unwrapped.

    A plugin whose forward alone needs all ranks calls `unit.set_forward_is_collective()`: a rank that has
    more batches than others then raises instead of waiting for them, in evaluation too.
    """


@spec("wrapper")
def wrap_optimizer(unit: Unit, optimizer: Optimizer) -> Optimizer:
    """Return the optimizer for per-step hooks: this optimizer, changed or not, or a wrapper.

    Its groups hold final parameters. A wrapper shares `param_groups` and `state` with the optimizer inside,
    so that a new learning rate reaches both. Replacing an engine's optimizer (`prepare_unit`) is an error.
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
    """Restore the state that this plugin's `save_state` returned; refresh masters, scales and graphs.

    Called on each plugin after the unit's weights and optimizers were overwritten in place. `entries` is
    empty if the checkpoint has no state of the plugin, as for an extension that joins later: begin anew then.
    """


# -- a step, in this order ---------------------------------------------------------------------------


@spec("owner", per_step=True)
def backward(unit: Unit, loss: Tensor, boundary: bool, options: Mapping[str, Any]) -> None:
    """Compute gradients of `loss` (0-dim, already divided by the window's size).

    `boundary` is True for the window's last micro-batch. `options` are arguments of torch's backward:
    retain_graph, create_graph, inputs. base: `loss.backward(**options)`.
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
    """Run forward and backward of one window of `microbatches`. base: the plain loop.

    If `microbatches` is None, it is `unit.window.size`, or an option of the strategy. A strategy that owns
    the schedule trains by this hook only, and takes `unit.whole_window`. Each loss is divided by
    `unit.window.divisor`. Core calls the hook under `torch.no_grad()` if `forward_only` is True.
    """


@spec("owner", per_step=True)
def reduce_gradients(unit: Unit) -> None:
    """Average over ranks the gradients that backward left unreduced, once per window, at its boundary.

    Losses are divided before backward, also if they are sums over items. Core never calls the hook for a unit
    without optimizers, and refuses to train such a unit. For gradients of a loss's own `backward()`, clip and
    step both call the hook: an average of averages is the average.
    """


@spec("owner")
def grad_scaler(unit: Unit) -> GradScaler | None:
    """Return the unit's loss scaler, or None.

    A precision that scales the loss returns the scaler: the device's own, if the device has one.
    """


@spec("owner", per_step=True)
def unscale(unit: Unit, optimizer: Optimizer) -> None:
    """Divide the optimizer's gradients by the loss scale, unless they are unscaled already.

    Called before each clip, and each time the user asks.
    """


@spec("owner", per_step=True)
def clip_gradients(
    unit: Unit, parameters: Sequence[nn.Parameter], limit: float, norm_type: float | None
) -> Tensor | None:
    """Clip gradients to exactly this norm, or raise; return the total norm before (0-dim).

    If `norm_type` is None, clamp each gradient to [-limit, limit] and return None, or raise.
    """


@spec("owner", per_step=True)
def optimizer_step(unit: Unit, optimizer: Optimizer, closure: Callable[[], Any] | None) -> bool:
    """Apply the optimizer; return False if the step was skipped, as after an overflow."""


@spec("owner", per_step=True)
def zero_grad(unit: Unit, optimizer: Optimizer, set_to_none: bool) -> None:
    """Clear the optimizer's gradients, at the end of a window only."""


# -- a checkpoint ------------------------------------------------------------------------------------


@spec("owner")
def model_state(unit: Unit) -> Mapping[str, Leaf]:
    """Return canonical name -> leaf, for each parameter and persistent buffer.

    Tensors are views of the live storage, of the most precise copy that exists. Every name is on every rank:
    a leaf without shards if the tensor lives on other ranks. Tied weights appear once (`unit.aliases`).
    """


@spec("owner")
def optimizer_state(unit: Unit, optimizer: Optimizer) -> OptimizerState:
    """Return the optimizer's state by canonical parameter name.

    A rank that has no part of a parameter's state returns a leaf without shards, with `replicated` as on
    other ranks.
    """


@spec("owner")
def refuse_optimizer_state(
    unit: Unit,
    optimizer: Optimizer,
    template: Mapping[str, Mapping[str, TensorTemplate]],
    plain: Mapping[str, Mapping[str, Json]],
) -> Sequence[str]:
    """Return reasons why `materialize_optimizer_state` could not take this state.

    Called on every rank before a load changes anything; not collective. A parameter that the checkpoint does
    not know, or that was never stepped, is in neither argument; a strategy that steps several parameters as
    one completes such a parameter, or refuses. base: no reasons.
    """


@spec("owner")
def materialize_optimizer_state(
    unit: Unit,
    optimizer: Optimizer,
    template: Mapping[str, Mapping[str, TensorTemplate]],
    plain: Mapping[str, Mapping[str, Json]],
) -> None:
    """Allocate optimizer state that does not exist yet, and set plain values.

    `template` and `plain` are by parameter name and key. Afterwards `optimizer_state` must return all of the
    template's leaves, without shards for state that other ranks hold; core copies into this rank's shards.
    """


@spec("owner")
def full_parameters(unit: Unit, names: Sequence[str], writeback: bool) -> AbstractContextManager[Any]:
    """Return a context in which the user's modules hold these parameters whole.

    Collective. If `writeback` is True, changes made inside are kept. base: the parameters are whole already.
    """


@spec("owner")
def iter_weights(
    unit: Unit, dtype: torch.dtype | None, to: torch.device | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield (canonical name, whole parameter or persistent buffer); tied weights once.

    Collective: all ranks iterate to the end. Holds a few weights in memory, never the model. `dtype` applies
    to floating-point weights. `to` is a device, which may differ from rank to rank; None: the cheapest
    device. base: the model's own tensors.
    """

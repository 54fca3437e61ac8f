"""The interface of a run for plugins and lower rooms, and the unit, for which per-step hooks are bound."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from attrs import define, field, frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet
    from contextlib import AbstractContextManager

    import torch
    from torch import Tensor, nn
    from torch.amp import GradScaler
    from torch.optim import Optimizer

    from accel_core.contract.bound import Hooks, Steps
    from accel_core.contract.card import Card
    from accel_core.contract.config import RunConfig
    from accel_core.contract.mesh import Mesh
    from accel_core.contract.window import Window
    from accel_core.contract.world import Collectives, Topology, World


@frozen(kw_only=True)
class StepOutput:
    """Result of `forward_backward`."""

    loss: Tensor
    """Sum of the micro-batches' losses, each divided as for its backward (0-dim, detached): their mean, or,
    if items are counted, a share whose mean over ranks is the mean loss of all items."""
    valid: bool = True
    """True if this rank has the loss (pipelines: the last stage)."""
    outputs: tuple[Any, ...] = ()
    """The second result of `forward_loss` for each micro-batch."""


class Run(Protocol):
    """Everything that one `Accelerator` owns: config, stack, device, world and units.

    Plugins are built with it: `Plugin(config, run)`.
    """

    run_id: str
    process: int
    """Id of the process that created the run."""
    ended: bool
    config: RunConfig
    resolved: Any
    """The config with the origin of each value."""
    stack: Any
    """The chosen plugins (`runtime/selection`)."""
    plugins: Mapping[str, object]
    """Name or alias -> instance: the stack's plugins and the user's own trackers."""
    configs: Mapping[str, object]
    """Name or alias -> the plugin's config object; None for plugins without options."""
    cards: Mapping[str, Card]
    """Name or alias -> the plugin's card."""
    environment: list[str]
    environment_notes: list[str]
    world: World
    device: torch.device
    mesh: Mesh | None
    topology: Topology
    mark_step: Callable[..., Any] | None
    """The device's hook `mark_step`; None if its plugin does nothing there."""
    observe_collective: Callable[[str, bool], None] | None
    """The hook `collective`; None if no plugin implements it."""
    after_backward: list[Callable[[Sequence[Unit]], object]]
    """Functions to call after each backward with the units that the loss trains."""
    prepared: Any
    """The objects that the run has prepared (`PreparedObjects`)."""
    registered: list[Any]
    unsaved_models: list[nn.Module]
    """Prepared models whose weights no checkpoint contains: the program saves them itself."""
    accumulation: Any
    """The innermost `accumulate` that is entered."""
    accumulation_steps: int
    windows: Sequence[Window]
    """Windows of the innermost `accumulate`; outside, of the last `accumulate` that was entered."""
    active_loaders: list[Any]
    """The prepared loaders that are being iterated, the innermost last."""
    trained_from: set[Any]
    """The prepared loaders in whose loops optimizers have stepped."""
    trackers: Any
    checkpoints: Any
    """The run's checkpoint session: saves, loads, and the state that they share."""

    @property
    def hooks(self) -> Hooks:
        """Hooks of the default stack."""

    @property
    def units(self) -> list[Unit]:
        """The units of the prepared objects."""

    @property
    def window(self) -> Window:
        """The innermost current window; outside, the last window."""

    @property
    def communication_backends(self) -> Mapping[str, str]:
        """Torch device type -> torch.distributed backend, of the run's device and the CPU."""

    def collectives(self, dim: str = "world") -> Collectives:
        """Return collectives over a mesh dimension. The first call for each dimension is collective."""

    def make_unit(self, name: str | None, strategy: str | None, made: Sequence[Unit] = ()) -> Unit:
        """Return a unit without objects, with the hooks of its strategy's stack."""

    def use_strategy(self, alias: str) -> None:
        """Set the default strategy of later calls of `prepare`."""

    def drop_accumulations(self) -> None:
        """Drop all entered contexts of `accumulate`."""

    def require_alive(self) -> None:
        """Raise AccelError after `end_training`."""

    def end(self, *, failed: bool = False) -> None:
        """Release units and the process group; the run cannot be used afterwards."""


@define(eq=False, repr=False, kw_only=True)
class Unit:
    """Models with their optimizers, schedulers and one strategy.

    An optimizer joins all models whose parameters it holds. A model without an optimizer is a unit too.
    `given`, `models` and `wrapped` have the same order.
    """

    name: str
    """The unit's name, under which checkpoints keep its state."""
    run: Run
    strategy: str
    """Alias of the strategy."""
    plugin: Any
    """The strategy's instance, for methods that only this strategy has."""
    strategy_owns_backward: bool = False
    """True if the strategy implements `backward`: no other unit can share a loss."""
    hooks: Hooks
    """The hooks of the strategy's stack."""
    steps: Steps
    """The per-step hooks, bound."""
    window: Window
    """The micro-batches of the current step."""
    step_state: Any
    """State of the gradients in the current step; private to core (`training/step_state`)."""
    names: Any
    """Name <-> parameter (`training/names`)."""
    changes: Any = None
    """Guard against changes that the strategy cannot follow; private to core (`training/changes`)."""
    mesh: Mesh | None = None
    """The mesh of the strategy's stack."""
    given: list[nn.Module] = field(factory=list)
    """The modules that the user passed to `prepare`."""
    models: list[nn.Module] = field(factory=list)
    """The modules inside the wrapped models: the user's own unless a transform replaced them."""
    wrapped: list[nn.Module] = field(factory=list)
    """The modules that `prepare` returned, which the user trains with."""
    config: Any = None
    """The strategy's options, with values that follow from the unit's objects."""
    optimizers: list[Optimizer] = field(factory=list)
    """The results of `wrap_optimizer`."""
    schedulers: list[Any] = field(factory=list)
    """The user's own schedulers, or an engine's."""
    scaler: GradScaler | None = None
    """The loss scaler; None without one."""
    detach: list[Callable[[], None]] = field(factory=list)
    """Functions that remove the autocast hooks from the models."""
    stream: Any = None
    """Random stream of the unit's forwards; None: they draw from the process's own streams."""
    forward_is_collective: bool = False
    """True if a forward alone needs all ranks; see `set_forward_is_collective`."""
    build_each: Callable[[], None] | None = None
    """Wraps new models and optimizers one by one; set while `prepare_unit` runs; private to core."""
    weights_are_whole: bool = False
    """True if each rank holds whole parameters without a card that says it; see `set_weights_are_whole`."""
    rehearses: bool = False
    """True in a forward on meaningless numbers; see `rehearsal`."""

    @property
    def pending(self) -> bool:
        """True while the unit has gradients that were neither applied nor cleared.

        A loss that several units share counts for each of them inside a window only: at the boundary, only
        the user knows which unit steps.
        """
        window, state = self.window, self.step_state
        if window.is_begun or state.shares_losses:
            return window.is_begun
        dropped = () if window.awaits_backward else window.deferred_zero_grads
        held = [each for each in state.phases if each is not None and each not in dropped]
        # A strategy may keep gradients outside the parameters, some strategies until they are reduced.
        kept = self.steps.zero_grad is not None and (self.strategy_owns_backward or state.is_partial)
        return any(kept or any(p.grad is not None for g in o.param_groups for p in g["params"]) for o in held)

    @property
    def offers(self) -> AbstractSet[str]:
        """The capability words of the strategy's card."""
        return self.run.cards[self.strategy].offers

    @property
    def has_whole_weights(self) -> bool:
        """True if each rank holds whole parameters, by the strategy's card or `set_weights_are_whole`."""
        return self.weights_are_whole or "whole_weights" in self.offers

    @property
    def is_in_no_sync(self) -> bool:
        """True inside a context without reduction, other than `accumulate`."""
        return bool(self.step_state.no_sync_depth)

    @contextmanager
    def without_reduction(self, models: Sequence[nn.Module] | None = None) -> Iterator[None]:
        """Keep the gradients of these models (wrapped; default: all of the unit) local to this rank.

        If the strategy reduces at a step, a step inside the context applies this rank's gradients.
        """
        no_sync, models = self.steps.no_sync, self.wrapped if models is None else models
        with nullcontext() if no_sync is None else no_sync(self, models), self.step_state.without_reduction():
            yield

    def use_scaler(self, scaler: GradScaler | None) -> None:
        """Scale losses by this scaler from now on."""
        self.scaler = scaler

    def use_build(self, build: Callable[[], None] | None) -> None:
        """Set the function by which the base's `prepare_unit` wraps new objects; None afterwards."""
        self.build_each = build

    def use_stream(self, stream: Any) -> None:
        """Make forwards draw random numbers from this stream; None: from the process's own streams."""
        self.stream = stream

    def use_config(self, config: Any) -> None:
        """Keep the strategy's options, with values that follow from the unit's objects."""
        self.config = config

    def use_changes(self, changes: Any) -> None:
        """Check these as each window opens, if there is something that the strategy cannot follow."""
        self.changes = changes or None
        if changes:
            self.step_state.require_custom_step()

    def note_unreduced(self) -> None:
        """Declare, in a backward, that its gradients stay unreduced: no step may come before another."""
        self.step_state.open(self.optimizers, partial=True)

    def set_forward_is_collective(self, value: bool = True) -> None:
        """Declare that a forward alone needs all ranks.

        Any plugin may call this, in a hook of `prepare`. False does not undo another plugin's declaration.
        """
        self.forward_is_collective = self.forward_is_collective or value

    def set_weights_are_whole(self, value: bool = True) -> None:
        """Declare that each rank holds whole parameters, for strategies whose options decide this.

        Strategies that always keep whole parameters offer `whole_weights` in their card instead.
        """
        self.weights_are_whole = value

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Mark a forward on meaningless numbers, for strategies that learn shapes from a forward.

        Plugins that record statistics of inputs must skip them while `rehearses` is True.
        """
        self.rehearses = True
        try:
            yield
        finally:
            self.rehearses = False

    def whole_window(
        self, batches: Iterator[Any], microbatches: int | None
    ) -> AbstractContextManager[list[Any]]:
        """Take the next batches as one window; return the window's step context, which yields them.

        Args:
            batches: iterator over micro-batches.
            microbatches: number of micro-batches; None: the window's size.

        Raises:
            StopIteration: `batches` has fewer.
        """
        taken = [next(batches) for _ in range(microbatches or self.window.size)]
        self.window.fill(len(taken))
        return self._around(taken)

    @contextmanager
    def _around(self, taken: list[Any]) -> Iterator[list[Any]]:
        around = self.steps.step_context
        with nullcontext() if around is None else around(self, taken[0]):
            yield taken

    def begin_anew(self) -> None:
        """Return to the state before a window, in which checkpoints are saved, and clear gradients."""
        self.window.begin_anew()
        self.run.drop_accumulations()
        self.step_state.clean_all()
        for optimizer in self.optimizers:
            clear = self.steps.zero_grad
            optimizer.zero_grad() if clear is None else clear(self, optimizer, True)

    @property
    def aliases(self) -> Mapping[str, str]:
        """Tied weights: alias -> the name of the weight in saved state."""
        aliases: Mapping[str, str] = self.names.aliases
        return aliases

    def add_models(self, originals: Sequence[nn.Module]) -> None:
        """Add models that are not wrapped yet."""
        self.given.extend(originals)
        self.names.begin(originals)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return name -> parameter, with tied weights once.

        Names are the names in the user's models, before any transform. A unit of several models prefixes each
        name with the model's number.
        """
        named: dict[str, nn.Parameter] = dict(self.names.all())
        for alias in self.names.aliases.keys() & named.keys():
            del named[alias]
        return named

    def qualify(self, number: int, name: str) -> str:
        """Return the name of a part of a model in saved state.

        Args:
            number: number of the model in the unit.
            name: present name of a parameter, buffer or module in the model.
        """
        kept: str = self.names.qualify(number, name)
        return kept

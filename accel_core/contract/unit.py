"""A run as plugins and the lower rooms see it, and a unit: what per-step hooks are bound for."""

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
    """Result of `forward_backward`.

    loss: the micro-batches' losses, each divided as for its backward, together (0-dim, detached): their mean,
        or by the items of all ranks, so that the mean over ranks is that of all items.
    valid: whether this rank has the loss (pipelines: the last stage).
    outputs: what `forward_loss` returned beside each loss.
    """

    loss: Tensor
    valid: bool = True
    outputs: tuple[Any, ...] = ()


class Run(Protocol):
    """Everything that one `Accelerator` owns: config, stack, device, world and units.

    Plugins are built with it: `Plugin(config, run)`.
    """

    run_id: str
    process: int
    """The process that made it."""
    ended: bool
    config: RunConfig
    resolved: Any
    """The config with the origin of each value."""
    stack: Any
    """The chosen plugins (`runtime/selection`)."""
    plugins: Mapping[str, object]
    """Name or alias -> instance, of the stack's plugins and the user's own trackers."""
    configs: Mapping[str, object]
    """The config object that each was made with; None of one without options."""
    cards: Mapping[str, Card]
    """The card of each of those plugins, by the same names."""
    environment: list[str]
    environment_notes: list[str]
    world: World
    device: torch.device
    mesh: Mesh | None
    topology: Topology
    mark_step: Callable[..., Any] | None
    """The device's per-step hook of that name; None where nothing is to be marked."""
    observe_collective: Callable[[str, bool], None] | None
    """The hook `collective`; None where no plugin follows it."""
    after_backward: list[Callable[[Sequence[Unit]], object]]
    """Called after each backward with the units that it trained."""
    prepared: Any
    """All that the run has prepared (`PreparedObjects`)."""
    registered: list[Any]
    unsaved_models: list[nn.Module]
    """Prepared models whose weights are in no saved state: their program keeps them."""
    accumulation: Any
    """The innermost `accumulate` that is entered."""
    accumulation_steps: int
    windows: Sequence[Window]
    """Windows of the innermost `accumulate`, or of the one entered last."""
    active_loaders: list[Any]
    trained_from: set[Any]
    """The prepared loaders that are being iterated, the innermost last."""
    trackers: Any
    checkpoints: Any
    """The run's checkpoint session: saves, loads, and what one leaves to the next."""

    @property
    def hooks(self) -> Hooks:
        """Hooks of the default stack."""

    @property
    def units(self) -> list[Unit]:
        """The units of what is prepared."""

    @property
    def window(self) -> Window:
        """The innermost current window, or the one used last."""

    @property
    def communication_backends(self) -> Mapping[str, str]:
        """Torch device type -> torch.distributed backend, of the run's device and the CPU."""

    def collectives(self, dim: str = "world") -> Collectives:
        """Return collectives over a dimension. The first call for one is collective."""

    def make_unit(self, name: str | None, strategy: str | None, made: Sequence[Unit] = ()) -> Unit:
        """Return a unit without objects, its hooks resolved for its strategy."""

    def use_strategy(self, alias: str) -> None:
        """Have later calls of `prepare` that name no strategy use this one."""

    def drop_accumulations(self) -> None:
        """Forget each `accumulate` that is entered."""

    def require_alive(self) -> None:
        """Raise AccelError after `end_training`."""

    def end(self, *, failed: bool = False) -> None:
        """Release units and process group; the run cannot be used afterwards."""


@define(eq=False, repr=False, kw_only=True)
class Unit:
    """Models with their optimizers, schedulers and one strategy.

    An optimizer joins all models whose parameters it holds. A model without an optimizer is a unit too.

    given: what the user prepared. wrapped: the module that `prepare` returned for each, which the user trains
    with. models: the module inside, the user's own unless a transform replaced it. All three in the same
    order. optimizers: what `wrap_optimizer` returned. schedulers: the user's own.
    plugin: the strategy's instance, for what only that strategy offers. mesh: that of its strategy's stack.
    name: of the unit; checkpoints keep its state under it. strategy: the alias of its strategy. run: its run.
    config: the strategy's options, completed. window: the micro-batches of its current step. scaler: the loss
    scaler, None without one. hooks: those of its stack; per-step hooks are bound in `steps`.
    """

    name: str
    run: Run
    strategy: str
    plugin: Any
    strategy_owns_backward: bool = False
    """True if the strategy implements `backward`: no other unit can share a loss."""
    hooks: Hooks
    steps: Steps
    window: Window
    step_state: Any
    """The gradients' state in the current step; core's own (`training/step_state`)."""
    names: Any
    """Name <-> parameter (`training/names`)."""
    changes: Any = None
    """Guard of what its strategy cannot follow, if anything; core's own (`training/changes`)."""
    mesh: Mesh | None = None
    given: list[nn.Module] = field(factory=list)
    models: list[nn.Module] = field(factory=list)
    wrapped: list[nn.Module] = field(factory=list)
    config: Any = None
    """The strategy's config, completed."""
    optimizers: list[Optimizer] = field(factory=list)
    schedulers: list[Any] = field(factory=list)
    scaler: GradScaler | None = None
    detach: list[Callable[[], None]] = field(factory=list)
    """Take the autocast hooks off the models again."""
    stream: Any = None
    """Random stream for forwards that must not draw from the process's own streams."""
    forward_is_collective: bool = False
    """True if a forward alone needs all ranks; see `set_forward_is_collective`."""
    build_each: Callable[[], None] | None = None
    """Wraps new models and optimizers by their own hooks, while `prepare_unit` is called; core's own."""
    weights_are_whole: bool = False
    """True if each rank holds whole parameters whatever the card says; see `set_weights_are_whole`."""
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
        # Their strategy may keep gradients elsewhere than in the parameters, some until they are reduced.
        kept = self.steps.zero_grad is not None and (self.strategy_owns_backward or state.is_partial)
        return any(kept or any(p.grad is not None for g in o.param_groups for p in g["params"]) for o in held)

    @property
    def offers(self) -> AbstractSet[str]:
        """The capability words of its strategy's card."""
        return self.run.cards[self.strategy].offers

    @property
    def has_whole_weights(self) -> bool:
        """True if each rank holds whole parameters, by its strategy's card or its plugin's word."""
        return self.weights_are_whole or "whole_weights" in self.offers

    @property
    def is_in_no_sync(self) -> bool:
        """True inside a context in which gradients are not reduced, `accumulate` aside."""
        return bool(self.step_state.no_sync_depth)

    @contextmanager
    def without_reduction(self, models: Sequence[nn.Module] | None = None) -> Iterator[None]:
        """Leave the gradients of these models (wrapped; default: all of the unit) to this rank.

        Also where the strategy reduces at a step: one inside applies what is there.
        """
        no_sync, models = self.steps.no_sync, self.wrapped if models is None else models
        with nullcontext() if no_sync is None else no_sync(self, models), self.step_state.without_reduction():
            yield

    def use_scaler(self, scaler: GradScaler | None) -> None:
        """Scale losses by this scaler from now on."""
        self.scaler = scaler

    def use_build(self, build: Callable[[], None] | None) -> None:
        """Wrap new objects by this function when `prepare_unit` asks the base to; None: when it has ended."""
        self.build_each = build

    def use_stream(self, stream: Any) -> None:
        """Have forwards draw random numbers from this stream; None: from the process's own."""
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
        """Say, in a backward, that its gradients stay unreduced: none may step before another."""
        self.step_state.open(self.optimizers, partial=True)

    def set_forward_is_collective(self, value: bool = True) -> None:
        """Declare that a forward alone needs all ranks.

        Any plugin may call this, in a hook of `prepare`. False leaves what another plugin declared.
        """
        self.forward_is_collective = self.forward_is_collective or value

    def set_weights_are_whole(self, value: bool = True) -> None:
        """Declare that each rank holds whole parameters, where the strategy's options decide it.

        Where they always are, the card offers `whole_weights`.
        """
        self.weights_are_whole = value

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Run a forward on meaningless numbers, of which no plugin keeps anything.

        For strategies that learn shapes by it. A plugin that keeps figures of its inputs asks `rehearses`.
        """
        self.rehearses = True
        try:
            yield
        finally:
            self.rehearses = False

    def whole_window(
        self, batches: Iterator[Any], microbatches: int | None
    ) -> AbstractContextManager[list[Any]]:
        """Run the next batches as one window, in its step's context.

        Raises StopIteration where there are fewer, as `next` does.
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
        """Return to before a window's first micro-batch, and clear gradients.

        Checkpoints are of this state.
        """
        self.window.begin_anew()
        self.run.drop_accumulations()
        self.step_state.clean_all()
        for optimizer in self.optimizers:
            clear = self.steps.zero_grad
            optimizer.zero_grad() if clear is None else clear(self, optimizer, True)

    @property
    def aliases(self) -> Mapping[str, str]:
        """Tied weights: alias -> the name under which the weight is kept."""
        aliases: Mapping[str, str] = self.names.aliases
        return aliases

    def add_models(self, originals: Sequence[nn.Module]) -> None:
        """Take models that are not wrapped yet."""
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
        """Return the name that a part of a model is kept under.

        number: of the model in the unit. name: of a parameter, buffer or module in the model as it is now.
        """
        kept: str = self.names.qualify(number, name)
        return kept

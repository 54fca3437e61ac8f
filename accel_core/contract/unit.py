"""A run as plugins and the lower rooms see it, and a unit: what per-step hooks are bound for."""

from __future__ import annotations

import re
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final, Protocol

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
    from accel_core.contract.stack import Stack
    from accel_core.contract.window import Window
    from accel_core.contract.world import Collectives, Topology, World

_WRAPPERS: Final = {
    "_orig_mod": "torch._dynamo.",
    "_checkpoint_wrapped_module": "torch.distributed.algorithms._checkpoint.",
}
"""Parts of names that torch.compile and checkpointing add -> their modules."""
_WRAPPED: Final = re.compile("|".join(_WRAPPERS)).search
PartName = tuple[str, str, Any]
"""(name in the model as it is, the user's name, tensor or module)."""


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
    stack: Stack
    """The chosen plugins."""
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
    aliases: dict[str, str] = field(factory=dict)
    """Tied weights: alias -> the name under which the weight is kept."""
    tied: set[str] = field(factory=set)
    """The aliases that are one parameter here; a strategy may keep a tie in several."""
    renamed: dict[nn.Module, dict[str, str]] = field(factory=dict)
    """Model -> its names that are not the given one's -> those."""
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
        dropped = () if window.awaits_backward else window.put_off
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
        return bool(self.step_state.quiet)

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
            self.step_state.require_finish()

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

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return canonical name -> parameter, with tied weights once.

        Names are those in the models as given. A unit of several models prefixes each name with the model's
        number.
        """
        named = dict(self.all_names())
        for alias in self.aliases.keys() & named.keys():
            del named[alias]
        return named

    def all_names(self) -> list[tuple[str, nn.Parameter]]:
        """(canonical name, parameter), tied weights under each of their names."""
        found: list[tuple[str, nn.Parameter]] = []
        for number, model in enumerate(self.models):
            named = model.named_parameters(remove_duplicate=False)
            if len(self.models) > 1 or self.renamed.get(model):
                found += [(self.qualify(number, name), parameter) for name, parameter in named]
            else:  # this runs for each parameter of each save
                for name, parameter in named:
                    found.append((own_name(model, name) if _WRAPPED(name) else name, parameter))
        return found

    # -- names of new models, and ties ------------------------------------------------------------

    def add_models(self, originals: Sequence[nn.Module]) -> dict[int, list[PartName]]:
        """Add models that are not wrapped yet; return the number and names of each.

        Tied weights are found again.
        """
        first = len(self.models)
        self.given.extend(originals)
        self.models.extend(map(inside, originals))
        if originals:
            self.record_aliases()
        return {
            number: [
                (name, own_name(model, name) if _WRAPPED(name) else name, part)
                for name, part in parts_of(model)
            ]
            for number, model in enumerate(self.models[first:], start=first)
        }

    def record_aliases(self) -> None:
        """Find tied weights: the first name of each keeps it, later names are aliases."""
        first: dict[nn.Parameter, str] = {}
        self.aliases = {}
        for name, parameter in self.all_names():
            if first.setdefault(parameter, name) != name:
                self.aliases[name] = first[parameter]

    def record_ties(self) -> None:
        """Find the aliases that are one parameter still, once the models are wrapped."""
        now = dict(self.all_names())
        owners = {alias: now.get(owner) for alias, owner in self.aliases.items() if alias in now}
        self.tied = {alias for alias, owner in owners.items() if now[alias] is owner}

    def drop_cut_ties(self) -> None:
        """Forget ties of weights that were one parameter when prepared and are two now."""
        now = dict(self.all_names()) if self.tied else {}
        for alias in [name for name in self.tied if name in now and self.aliases.get(name) in now]:
            if now[alias] is not now[self.aliases[alias]]:
                self.tied.discard(alias)
                del self.aliases[alias]

    def qualify(self, number: int, name: str) -> str:
        """Return a name's canonical form: the name in the model as it was given.

        number: of the model in the unit. What torch's own wrappers add to a name is left out, so that a
        part of a model may be wrapped or not.
        """
        renamed = self.renamed.get(self.models[number], {})
        name = renamed[name] if name in renamed else own_name(self.models[number], name)
        return name if len(self.models) == 1 else f"{number}.{name}"


def inside(model: Any) -> Any:
    """Return the module inside `torch.compile(model)`; anything else as it is."""
    compiled = type(model).__module__.startswith("torch._dynamo.")
    return model._modules["_orig_mod"] or model if compiled else model


def parts_of(model: nn.Module) -> list[tuple[str, Tensor | nn.Module]]:
    """Return all named parts of the model: tensors, and modules that may hold more state."""
    return [
        *model.named_modules(remove_duplicate=False),
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]


def own_name(model: nn.Module, name: str) -> str:
    """Return a name in the model without what torch's own wrappers add to it.

    A child of the user's that is called like such a wrapper's keeps its name.
    """
    if not _WRAPPED(name):
        return name
    module: nn.Module | None = model
    kept = []
    for part in name.split("."):
        home = _WRAPPERS.get(part)
        if home is None or not any(kind.__module__.startswith(home) for kind in type(module).__mro__):
            kept.append(part)
        module = None if module is None else module._modules.get(part)
    return ".".join(kept)

"""A unit: what `prepare` makes and per-step hooks are bound for; and its window of micro-batches."""

from __future__ import annotations

import re
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final, Protocol

from attrs import define, field, frozen

from accel_core.errors import AccelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
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
    from accel_core.contract.world import Collectives, Topology, World
    from accel_core.errors import CollectiveError

__all__ = ["StepOutput", "Unit", "UnitRun", "Window", "own_name"]

_WRAPPERS: Final = {
    "_orig_mod": "torch._dynamo.",
    "_checkpoint_wrapped_module": "torch.distributed.algorithms._checkpoint.",
}
"""What torch.compile and activation checkpointing put into the names of what they wrap -> where they live."""
_WRAPPED: Final = re.compile("|".join(_WRAPPERS)).search


class Window:
    """The micro-batches of one optimizer step, counted by core alone. Only its methods write it.

    index: 0-based number of the current micro-batch in the window; -1 before the first.
    size: micro-batches a window has, unless the loader ends earlier.
    boundary: whether the current micro-batch is the window's last.
    fresh: whether the micro-batch's gradients may still be to come: it is entered, and neither a backward
        nor clipping nor a step of ours has been called, and it is not left.
    items: what this rank's micro-batches hold so far, where losses are sums over items; else None.
    number: of the window, counted from 1 for what comes before the first.

    The states of a micro-batch, and what the calls of an optimizer do in them:

        micro-batch         state       step        zero_grad
        the only one        any         applies     clears
        the first           fresh       nothing     clears, unless it did since the last window's boundary
        the first           not fresh   nothing     nothing
        one in the middle   any         nothing     nothing
        the last            fresh       applies     nothing: it stands before the forward
        the last            not fresh   applies     clears
    """

    __slots__ = ("_left", "_next", "boundary", "fresh", "index", "items", "number", "size")

    def __init__(self, size: int = 1) -> None:
        self.index = -1
        self.size = self._next = size
        self.boundary = True
        self.fresh = True
        self.items: Tensor | float | None = None
        self.number = 1
        self._left: tuple[int, int] | None = None

    @property
    def place(self) -> tuple[int, int]:
        """Which micro-batch is the current one: the window's number, and its index in that."""
        return self.number, self.index

    def end_loop(self, place: tuple[int, int]) -> None:
        """Note that a loop over a loader is over that found the window at this place."""
        if self.place != place:  # it trained
            self._left = self.place

    @property
    def is_left(self) -> bool:
        """Whether the loop is over that the current micro-batch was in."""
        return self._left == self.place

    @property
    def divisor(self) -> int:
        """What losses of micro-batches are divided by: their number, where they are means."""
        return self.size if self.items is None else 1

    def enter(self, last: bool, items: Tensor | float | None) -> None:
        """Begin the next micro-batch: of this window, or after its boundary of a new one.

        Raises AccelError, and changes nothing, where some micro-batches count items and others do not.
        """
        if self.boundary:
            self.index, self.size, self.items = 0, self._next, items
            self.number += 1
        else:
            if items is not None or self.items is not None:
                self._count(items)
            self.index += 1
        self.boundary = last or self.index + 1 >= self.size
        self.fresh = True

    def _count(self, items: Tensor | float | None) -> None:
        if items is None or self.items is None:
            raise AccelError(
                "accumulate was told the items of some micro-batches of a window, and not of others\n"
                "give items= to each (0 where there are none), or to none"
            )
        self.items = self.items + items

    def ran(self) -> None:
        """Note that what is called from now on comes after the current micro-batch's backward."""
        self.fresh = False

    def begin_whole(self, items: Tensor | float | None) -> None:
        """Begin a window that is run as a whole; `items` are those of all its micro-batches."""
        self.index, self.size, self.boundary, self.items = -1, self._next, False, items
        self.number += 1

    def fill(self, count: int) -> None:
        """Be at the last of `count` micro-batches."""
        self.index, self.size, self.boundary = count - 1, count, True

    def end_whole(self) -> None:
        """End a window that was run as a whole; the next one has the size that is set."""
        self.size = self._next
        self.fresh = False

    def begin_anew(self) -> None:
        """Be before the first micro-batch of a window."""
        self.index, self.size, self.boundary, self.fresh, self.items = -1, self._next, True, True, None

    def mark_last(self, last: bool) -> None:
        """Make the current micro-batch the window's last, or not."""
        self.boundary = last

    def resize(self, size: int, *, at_once: bool) -> None:
        """Give windows this size from the next one on, which begins at once where none is entered."""
        self._next = size
        if self.boundary and at_once:
            self.size = size

    def drop_items(self) -> None:
        """Hold none, as losses outside of any window do."""
        self.items = None

    def snapshot(self) -> tuple[Any, ...]:
        """What `restore` takes."""
        return self.index, self.size, self.boundary, self.fresh, self.items, self.number

    def restore(self, state: tuple[Any, ...]) -> None:
        """Be what the window was when this snapshot was taken; a size that was set meanwhile stays."""
        self.index, self.size, self.boundary, self.fresh, self.items, self.number = state

    def cleared(self, before: int) -> int:
        """The number of the window that has no older gradients if `zero_grad` clears now; 0: it must not.

        before: that number as of the optimizer's last `zero_grad`. The table is in the class's docstring.
        """
        if self.boundary:
            if not self.fresh:
                return self.number + 1
            return self.number if self.index <= 0 else 0
        return self.number if self.fresh and self.index == 0 and before < self.number else 0

    def __repr__(self) -> str:
        return f"Window(index={self.index}, size={self.size}, boundary={self.boundary})"


@frozen(kw_only=True)
class StepOutput:
    """Result of `forward_backward`.

    loss: mean loss of the micro-batches, or their sum if losses are sums over items (0-dim, detached).
    valid: whether this rank has the loss (pipelines: the last stage).
    outputs: what `forward_loss` returned beside each loss.
    """

    loss: Tensor
    valid: bool = True
    outputs: tuple[Any, ...] = ()


class UnitRun(Protocol):
    """The run of a unit, without its units: see `Run`."""

    config: RunConfig
    world: World
    device: torch.device
    mesh: Mesh | None
    topology: Topology
    resolved: Any
    """The config with the origin of each value."""
    run_id: str
    ended: bool
    mark_step: Callable[..., Any] | None
    """The device's per-step hook of that name; None where nothing is to be marked."""
    homes: Any
    """Parameter -> its unit and its name in it."""
    accumulation: Any
    """The innermost `accumulate` that is entered."""
    trackers: Any
    loaders: list[Any]
    """What `prepare` returned for dataloaders."""
    apart: list[nn.Module]

    @property
    def hooks(self) -> Hooks:
        """Those of the default stack."""

    @property
    def stack(self) -> Stack:
        """The chosen plugins."""

    @property
    def plugins(self) -> Mapping[str, object]:
        """The instances of the stack's plugins, by name or alias."""

    @property
    def configs(self) -> Mapping[str, object]:
        """The config object of each plugin; None of one without options."""

    @property
    def cards(self) -> Mapping[str, Card]:
        """The card of each of those plugins."""

    @property
    def window(self) -> Window:
        """The innermost current window, or the one used last."""

    def collectives(self, dim: str = "world") -> Collectives:
        """Collectives over a dimension. The first call for a dim is collective."""

    def lost_peer(self, operation: str, error: RuntimeError) -> CollectiveError | None:
        """The error that names the ranks that were lost, where torch's error says that some were."""

    def drop_accumulations(self) -> None:
        """Forget each `accumulate` that is entered."""

    def require_alive(self) -> None:
        """Raise AccelError after `end_training`."""


@define(eq=False, kw_only=True)
class Unit:
    """Models that an optimizer (or nothing) joins, with their optimizers, schedulers and strategy.

    given: what the user prepared. wrapped: what became of each, which the user trains with. models:
    the module inside, the user's own unless a transform replaced it. All three in the same order.
    optimizers: what `wrap_optimizer` returned. schedulers: the user's own.
    plugin: the strategy's instance, for what only that strategy offers. mesh: that of its strategy's stack.
    name: of the unit; checkpoints keep its state under it. strategy: the alias of its strategy. run: its run.
    config: the strategy's options, completed. window: the micro-batches of its current step. scaler: the loss
    scaler, None without one. hooks: those of its stack; per-step hooks are bound in `steps`.
    """

    name: str
    run: UnitRun
    strategy: str
    plugin: Any
    hooks: Hooks
    steps: Steps
    window: Window
    mesh: Mesh | None = None
    given: list[nn.Module] = field(factory=list)
    models: list[nn.Module] = field(factory=list)
    wrapped: list[nn.Module] = field(factory=list)
    config: Any = None
    """The strategy's config, completed."""
    optimizers: list[Optimizer] = field(factory=list)
    schedulers: list[Any] = field(factory=list)
    scaler: GradScaler | None = None
    backward_is_strategys: bool = False
    """Whether the strategy implements `backward` itself, so that no other unit can share a loss."""
    aliases: dict[str, str] = field(factory=dict)
    """Tied weights: alias -> the name under which the weight is kept."""
    tied: set[str] = field(factory=set)
    """The aliases that are one parameter here; a strategy may keep a tie in several."""
    renamed: dict[nn.Module, dict[str, str]] = field(factory=dict)
    """Model -> its names that are not the given one's -> those."""
    detach: list[Callable[[], None]] = field(factory=list)
    """Take the autocast hooks off the models again."""
    stream: Any = None
    """What its forwards draw random numbers from, where the process's own streams will not do."""
    finishes: bool = field(init=False)
    """Whether a step is more than torch's: somebody reduces, unscales, steps, follows or marks it."""
    gathers: bool = False
    """Whether a forward alone needs all ranks; a strategy under which it does says so in `wrap_model`."""
    joined: bool = False
    """Whether ranks may run out of batches now."""
    silent: int = 0
    """How many contexts are entered in which gradients are not reduced, `accumulate` aside."""
    reduced: dict[Optimizer | None, Any] = field(factory=dict)
    """The optimizers with reduced gradients that they have yet to apply or drop; None: a unit without any.
    Of several that a loop trains by the loss's own backward: which gradients these are."""
    undivided: tuple[int, Any] | None = None
    """The number of the window whose gradients are still to be divided by its items, and which they are."""
    unscaled: set[Optimizer] = field(factory=set)
    """The optimizers that were unscaled in this window."""
    waiting: set[Optimizer] = field(factory=set)
    """The optimizers with gradients of this unit's own losses that they have yet to apply or drop."""

    def __attrs_post_init__(self) -> None:
        steps = self.steps
        more = (
            steps.reduce_gradients,
            steps.unscale,
            steps.optimizer_step,
            steps.after_step,
            self.run.mark_step,
        )
        self.finishes = any(hook is not None for hook in more)

    @property
    def pending(self) -> bool:
        """Whether there are gradients that no optimizer step has applied, nor `zero_grad` dropped.

        A loss that several units share counts for each of them inside a window only: at its boundary
        nobody but the user knows whose it is.
        """
        window = self.window
        inside = not window.boundary and (window.index > 0 or not window.fresh)
        return inside or bool(self.waiting)

    def whole_window(
        self, batches: Iterator[Any], microbatches: int | None
    ) -> AbstractContextManager[list[Any]]:
        """The next batches as one window, in the context of its step: for `forward_backward`.

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
        """Be before a window's first micro-batch, without gradients: so is what a checkpoint holds."""
        self.window.begin_anew()
        self.run.drop_accumulations()
        self.waiting.clear()
        self.reduced.clear()
        self.unscaled.clear()
        for optimizer in self.optimizers:
            clear = self.steps.zero_grad
            optimizer.zero_grad() if clear is None else clear(self, optimizer, True)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Canonical name -> parameter, tied weights once. Names are those in the models as given.

        A unit of several models prefixes each name with the model's number.
        """
        return {name: parameter for name, parameter in self.all_names() if name not in self.aliases}

    def all_names(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(canonical name, parameter), tied weights under each of their names."""
        for number, model in enumerate(self.models):
            for name, parameter in model.named_parameters(remove_duplicate=False):
                yield self.qualify(number, name), parameter

    def record_aliases(self) -> None:
        """Find tied weights: the first name of each keeps it, later names are aliases."""
        first: dict[nn.Parameter, str] = {}
        self.aliases = {}
        for name, parameter in self.all_names():
            if first.setdefault(parameter, name) != name:
                self.aliases[name] = first[parameter]

    def drop_cut_ties(self) -> None:
        """Forget the ties of weights that were one when they were prepared, and are two by now."""
        now = dict(self.all_names()) if self.tied else {}
        for alias in [each for each in self.tied if each in now and self.aliases.get(each) in now]:
            if now[alias] is not now[self.aliases[alias]]:
                self.tied.discard(alias)
                del self.aliases[alias]

    def qualify(self, number: int, name: str) -> str:
        """The canonical form of a name in the unit's model `number`: the one in the model as given, without
        what torch's own wrappers add to it, so that a part of a model may be wrapped or not.
        """
        renamed = self.renamed.get(self.models[number], {})
        name = renamed[name] if name in renamed else own_name(self.models[number], name)
        return name if len(self.models) == 1 else f"{number}.{name}"


def own_name(model: nn.Module, name: str) -> str:
    """A name in the model without what torch's own wrappers add to it; a child of theirs may be called so."""
    if not _WRAPPED(name):  # this runs for each parameter of each save
        return name
    module: nn.Module | None = model
    kept = []
    for part in name.split("."):
        home = _WRAPPERS.get(part)
        if home is None or not any(kind.__module__.startswith(home) for kind in type(module).__mro__):
            kept.append(part)
        module = None if module is None else module._modules.get(part)
    return ".".join(kept)

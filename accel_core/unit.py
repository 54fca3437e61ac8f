"""A unit: what `prepare` makes and per-step hooks are bound for; and its window of micro-batches."""

from __future__ import annotations

import re
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final

from attrs import define, field

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from torch import Tensor, nn
    from torch.amp import GradScaler
    from torch.optim import Optimizer

    from accel_core.binding import Hooks, Steps
    from accel_core.mesh import Mesh
    from accel_core.run import Run

__all__ = ["Unit", "Window"]

_WRAPPERS: Final = re.compile(r"(?<![^.])(?:_orig_mod|_checkpoint_wrapped_module)\.")
"""What torch.compile and activation checkpointing put into the names of what they wrap."""


class Window:
    """The micro-batches of one optimizer step, counted by core alone. Settable.

    index: 0-based number of the current micro-batch in the window; -1 before the first.
    size: micro-batches a window has, unless the loader ends earlier.
    boundary: whether the current micro-batch is the window's last.
    fresh: whether no backward has run in the current micro-batch yet.
    items: what this rank's micro-batches hold so far, where losses are sums over items; else None.
    """

    __slots__ = ("boundary", "fresh", "index", "items", "size")

    def __init__(self, size: int = 1) -> None:
        self.index = -1
        self.size = size
        self.boundary = True
        self.fresh = True
        self.items: Tensor | float | None = None

    @property
    def divisor(self) -> int:
        """What losses of micro-batches are divided by: their number, where they are means."""
        return self.size if self.items is None else 1

    def __repr__(self) -> str:
        return f"Window(index={self.index}, size={self.size}, boundary={self.boundary})"


@define(eq=False, kw_only=True)
class Unit:
    """Models that an optimizer (or nothing) joins, with their optimizers, schedulers and strategy.

    given: what the user prepared. wrapped: what became of each, which the user trains with. models:
    the module inside, the user's own unless a transform replaced it. All three in the same order.
    optimizers: what `wrap_optimizer` returned. schedulers: the user's own.
    plugin: the strategy's instance, for what only that strategy offers. mesh: that of its strategy's stack.
    """

    name: str
    run: Run
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
    renamed: dict[nn.Module, dict[str, str]] = field(factory=dict)
    """Model -> its names that are not the given one's -> those."""
    detach: list[Callable[[], None]] = field(factory=list)
    """Take the autocast hooks off the models again."""
    finishes: bool = field(init=False)
    """Whether a step is more than torch's: somebody reduces, unscales, steps, follows or marks it."""
    gathers: bool = False
    """Whether a forward alone needs all ranks; a strategy under which it does says so in `wrap_model`."""
    joined: bool = False
    """Whether ranks may run out of batches now."""
    silent: int = 0
    """How many contexts are entered in which gradients are not reduced, `accumulate` aside."""
    reduced: bool = False
    """Whether `reduce_gradients` ran in this window."""
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
        """The next batches as one window, in the context of its step: for schedules that take all at once.

        Raises StopIteration where there are fewer, as `next` does.
        """
        window = self.window
        taken = [next(batches) for _ in range(microbatches or window.size)]
        window.index, window.size, window.boundary = len(taken) - 1, len(taken), True
        return self._around(taken)

    @contextmanager
    def _around(self, taken: list[Any]) -> Iterator[list[Any]]:
        around = self.steps.step_context
        with nullcontext() if around is None else around(self, taken[0]):
            yield taken

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

    def qualify(self, number: int, name: str) -> str:
        """The canonical form of a name in the unit's model `number`: the one in the model as given, without
        what torch's own wrappers add to it, so that a part of a model may be wrapped or not.
        """
        name = _WRAPPERS.sub("", self.renamed.get(self.models[number], {}).get(name, name))
        return name if len(self.models) == 1 else f"{number}.{name}"

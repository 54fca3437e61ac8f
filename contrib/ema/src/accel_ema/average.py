"""The moving average of one unit's weights, as far as this rank holds them."""

from __future__ import annotations

from operator import is_
from typing import TYPE_CHECKING

import torch
from attrs import define, evolve, field

from accel_core import AccelError, Leaf

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch import Tensor, nn

    from accel_core import Unit
    from accel_ema.config import EMAConfig

__all__ = ["Average"]


@define(eq=False)
class Part:
    """The tensors that one optimizer steps, as flat lists of this rank's boxes.

    averages, weights: of one dtype, on one device, box by box. apart: other pairs.
    """

    names: set[str]
    averages: list[Tensor] = field(factory=list)
    weights: list[Tensor] = field(factory=list)
    apart: list[tuple[Tensor, Tensor]] = field(factory=list)

    def add(self, average: Tensor, weight: Tensor) -> None:
        """Add a box."""
        if (average.dtype, average.device) == (weight.dtype, weight.device):
            self.averages.append(average)
            self.weights.append(weight)
        else:
            self.apart.append((average, weight))

    def approach(self, share: float) -> None:
        """Move averages by this share of the way to the weights."""
        if share == 1:
            self.copy_weights()
            return
        if self.averages:
            torch._foreach_lerp_(self.averages, self.weights, share)
        for average, weight in self.apart:
            average.lerp_(weight.to(average.device, average.dtype), share)

    def copy_weights(self) -> None:
        """Begin anew from the weights."""
        averages, weights = self.lists()
        _copy(weights, averages)

    def lists(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the averages and the weights, box by box."""
        averages, weights = [average for average, _ in self.apart], [weight for _, weight in self.apart]
        return self.averages + averages, self.weights + weights


class Average:
    """The average of a unit's trainable weights, of the most precise copy there is.

    steps: applied steps of each of the unit's optimizers; weights follow the optimizer that steps them.
    """

    def __init__(self, unit: Unit, config: EMAConfig) -> None:
        self.unit, self.config = unit, config
        self.steps: list[int] = []
        self._boxes: dict[str, tuple[Tensor, ...]] = {}
        self._unbegun: set[str] = set()
        """Names whose boxes are copies of weights so far: an update begins them."""
        self._leaves: dict[str, Leaf] = {}
        self._parts: list[Part] = []
        self._weights: dict[str, list[Tensor]] = {}
        self._found: list[tuple[nn.Parameter, tuple[int, bool]]] = []
        self._stepped: list[nn.Parameter] = []
        self._held: dict[str, list[Tensor]] | None = None
        """The weights' own values, while the average is in their place."""

    @property
    def is_swapped(self) -> bool:
        """True while the model's weights are the average."""
        return self._held is not None

    def forget_weights(self) -> None:
        """Find the weights again before the next use."""
        self._found = []

    def begin_anew(self) -> None:
        """Drop the average: the next update copies the weights."""
        self.steps = [0] * len(self.steps)
        self.forget_weights()

    @property
    def names(self) -> list[str]:
        """The names of the weights whose average an update has begun."""
        return sorted(self._boxes.keys() - self._unbegun)

    def keep_only(self, names: Collection[str]) -> None:
        """Begin anew the averages of other weights than these."""
        self._unbegun = self._boxes.keys() - names

    @torch.inference_mode(False)
    @torch.no_grad()
    def note_step(self, number: int) -> None:
        """Follow an applied step of the unit's optimizer of this number."""
        self.steps += [0] * (len(self.unit.optimizers) - len(self.steps))
        self.steps[number] += 1
        since = self.steps[number] - 1 - self.config.update_after
        if since >= 0 and since % self.config.update_every == 0:
            self._find()
            self._copy_unbegun()
            self._parts[number].approach(1 - self.config.decay_at(since // self.config.update_every))
            if self._unbegun:
                self._unbegun -= self._parts[number].names

    @torch.inference_mode(False)
    @torch.no_grad()
    def share(self) -> None:
        """Take the mean over the ranks that have stepped alone. Collective.

        It is the average of their mean weights: an update is linear in average and weights. A rank without
        an update counts with its weights. Ranks go on with the largest of their counts.
        """
        run = self.unit.run
        ranks = run.collectives(run.topology.loss_dim)
        self._begin_unstepped()
        begun = [not part.names & self._unbegun for part in self._parts]
        counts = torch.tensor([*self.steps, *begun], dtype=torch.float64, device="cpu")
        counts = run.collectives("control").all_reduce(counts, "max")
        self.steps = [int(count) for count in counts[: len(self.steps)]]
        for part, is_begun in zip(self._parts, counts[len(self.steps) :], strict=True):
            if is_begun:
                self._unbegun -= part.names
            for average, weight in zip(*part.lists(), strict=True):
                average.copy_(ranks.all_reduce(average.to(weight.device), "mean"))

    @torch.inference_mode(False)
    @torch.no_grad()
    def leaves(self) -> Mapping[str, Leaf]:
        """Return name -> the average, to be saved, or overwritten by what was saved."""
        self._begin_unstepped()
        return self._leaves

    # -- in the place of the weights -------------------------------------------------------------

    @torch.inference_mode(False)
    @torch.no_grad()
    def put_in(self) -> None:
        """Put the average in the place of the weights. Collective."""
        self.forget_weights()  # a strategy takes over edited weights when it is asked for them
        self._find()
        self._copy_unbegun()
        begun = [
            part
            for part, steps in zip(self._parts, self.steps, strict=False)
            if steps > self.config.update_after
        ]
        names = {name for part in begun for name in part.names & self._weights.keys()}
        self._held = {name: [weight.clone() for weight in self._weights[name]] for name in names}
        for part in begun:
            _copy(*part.lists())
        self.unit.hooks.load_state(self.unit, {})

    @torch.inference_mode(False)
    @torch.no_grad()
    def take_out(self) -> list[str]:
        """Give weights their own values back, moved or not. Collective.

        Return the names under which there are other parameters by now, which stay as they are.
        """
        held = self._held or {}
        named, known = self.unit.named_parameters(), {id(parameter) for parameter, _ in self._found}
        replaced = [name for name in held if name in named and id(named[name]) not in known]
        self._find()
        for name, own in held.items():
            _copy(own, self._weights[name])
        self.unit.hooks.load_state(self.unit, {})
        self._held = None
        return replaced

    def _begin_unstepped(self) -> None:
        """Have averages that no update has begun be the weights."""
        self.steps += [0] * (len(self.unit.optimizers) - len(self.steps))
        self._find()
        self._copy_unbegun()
        for part, steps in zip(self._parts, self.steps, strict=True):
            if steps <= self.config.update_after:
                part.copy_weights()

    def _copy_unbegun(self) -> None:
        for name in self._unbegun & self._weights.keys():
            _copy(self._weights[name], [*self._boxes[name]])

    # -- the tensors -----------------------------------------------------------------------------

    def _find(self) -> None:
        """Pair averages with weights; again if some moved, were unfrozen, are new."""
        unit = self.unit
        stepped = _stepped(unit)
        if (
            self._found
            and len(stepped) == len(self._stepped)
            and all(map(is_, stepped, self._stepped))
            and all(_place(parameter) == place for parameter, place in self._found)
        ):
            return
        named = unit.named_parameters()
        trained = {name for name, parameter in named.items() if parameter.requires_grad}.union(self.names)
        parts = [Part(names & trained) for names in self._names()]
        self._leaves, self._weights = {}, {}
        state = unit.hooks.model_state(unit)
        self._check({name for part in parts for name in part.names}, state)
        for name, leaf in state.items():
            for part in parts:
                if name in part.names:
                    self._add(part, name, leaf)
        self._parts, self._stepped = parts, stepped
        self._found = [(parameter, _place(parameter)) for parameter in named.values()]

    def _check(self, names: set[str], state: Mapping[str, Leaf]) -> None:
        """Raise if weights to be averaged are not there, or are there as copies."""
        apart = sorted(names & self.unit.named_parameters().keys() - state.keys())
        if apart:
            raise AccelError(
                f"ema: {apart[0]} of unit {self.unit.name!r} is trained, and held as several tensors"
                " (quantised, say), of which there is no average\nfreeze it, or leave out the extension ema"
            )
        again = {} if self._boxes else self.unit.hooks.model_state(self.unit)
        for name in sorted(names & again.keys()):
            pairs = zip(state[name].shards, again[name].shards, strict=True)
            if any(one.data_ptr() != other.data_ptr() for (_, one), (_, other) in pairs):
                raise AccelError(
                    f"ema: the strategy offers copies of {name}, and an average of them follows no step\n"
                    "leave out the extension ema, or take another strategy"
                )

    def _names(self) -> list[set[str]]:
        """Return the names that each optimizer steps."""
        unit = self.unit
        if len(unit.optimizers) == 1:
            return [{*unit.named_parameters()}]
        states = [unit.hooks.optimizer_state(unit, optimizer) for optimizer in unit.optimizers]
        return [{name for group in state.groups for name in group["params"]} for state in states]

    def _add(self, part: Part, name: str, leaf: Leaf) -> None:
        boxes = self._boxes.get(name)
        if boxes is None or [box.shape for box in boxes] != [box.shape for _, box in leaf.shards]:
            if boxes is not None and any(self.steps):
                raise AccelError(
                    f"ema: {name} of unit {self.unit.name!r} is laid out anew, and its average is not\n"
                    "save the state before, and load it after that"
                )
            boxes = self._boxes[name] = tuple(self._begin(name, box) for _, box in leaf.shards)
            self._unbegun.add(name)
        self._weights[name] = [weight for _, weight in leaf.shards]
        for average, weight in zip(boxes, self._weights[name], strict=True):
            part.add(average, weight)
        offsets = [offset for offset, _ in leaf.shards]
        self._leaves[name] = evolve(leaf, shards=tuple(zip(offsets, boxes, strict=True)))

    def _begin(self, name: str, weight: Tensor) -> Tensor:
        if weight.is_meta:
            raise AccelError(
                f"ema: {name} of unit {self.unit.name!r} has no values, it is on the meta device\n"
                "give it values before the first optimizer step"
            )
        # A small share of the difference is lost in 16 bits: such an average would never move.
        dtype = torch.float32 if weight.dtype.itemsize < 4 else weight.dtype
        device = "cpu" if self.config.device == "cpu" else weight.device
        return weight.detach().to(device, dtype, copy=True)


def _copy(source: list[Tensor], target: list[Tensor]) -> None:
    if source:
        torch._foreach_copy_(target, source)


def _stepped(unit: Unit) -> list[nn.Parameter]:
    return [
        each for optimizer in unit.optimizers for group in optimizer.param_groups for each in group["params"]
    ]


def _place(parameter: nn.Parameter) -> tuple[int, bool]:
    """Return where a parameter's values are, and whether they are trained."""
    local: Tensor = getattr(parameter, "_local_tensor", parameter)
    return local.data_ptr(), parameter.requires_grad

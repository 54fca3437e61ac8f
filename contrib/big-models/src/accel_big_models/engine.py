"""Blocks that come and go: counted, ordered, and brought ahead of their turn."""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import fields, is_dataclass
from typing import Any, Final

import torch
from attrs import define, field, frozen
from torch import Tensor

from accel_big_models.composing import composed, in_memory, is_composed, is_in_memory, leaves_of, values_of
from accel_big_models.moving import Cargo, Mover, Slot
from accel_big_models.sources import Source
from accel_big_models.swapping import exchange, like, put, takes
from accel_core import AccelError, is_out_of_memory, ops

__all__ = ["Engine", "Group", "Refuse", "Weight", "tensors_in"]

SLOTS: Final = 2
"""Blocks on the device: the one that computes, and the next one."""


@define(eq=False)
class Weight:
    """A parameter that comes and goes; it stays the same object.

    name: its first one in the model. source: its values while it is away.
    """

    name: str
    tensor: Tensor
    source: Source
    trained: bool = False
    """True while the weight is on the device, if it requires a gradient otherwise."""
    _present: Tensor | None = None
    """The other form of a tensor whose device has a class of its own."""
    _seen: tuple[int, int | None, torch.dtype | None] = (0, None, None)
    """The tensor's version, which counts writes, and its data, when it came or left."""
    _whole: weakref.ref[Tensor] | None = None

    def __getstate__(self) -> dict[str, Any]:
        source = self.fresh()
        held = is_in_memory(source)
        return {"name": self.name, "tensor": self.tensor, "source": None if held else source}

    def __setstate__(self, state: dict[str, Any]) -> None:
        tensor = state["tensor"]
        held = in_memory(tensor.detach())  # the copy's own values, once and not twice
        self.__init__(state["name"], tensor, state["source"] or held)  # type: ignore[misc]

    def leave(self) -> None:
        """Take the weight off the device: its data are the source's tensor, or of size 0.

        Data of size 0 raise if something computes with the weight outside of its block. Data that keep the
        shape do not: one element expanded computes wrong numbers, and a freed storage ends the process.
        """
        if self._present is not None:
            exchange(self.tensor, self._present)
            self._present = None
        else:
            if self.trained:
                self.tensor.requires_grad_(True)
            away = self.source.tensor()
            put(self.tensor, torch.empty(0, dtype=self.source.dtype) if away is None else away)
        self._seen = self._now()

    def come(self, data: Tensor) -> None:
        """Give the weight its data, as a constant: nothing could keep its gradient."""
        self.trained = self.tensor.requires_grad
        if takes(self.tensor, data):
            self.tensor.data = data
        else:
            self._present = like(self.tensor, data)
            exchange(self.tensor, self._present)
        if self.trained:
            self.tensor.requires_grad_(False)
        self._seen = self._now()

    @property
    def changed(self) -> bool:
        """True if the tensor was written to, or given other data, since it moved."""
        return self._seen != self._now()

    def _now(self) -> tuple[int, int | None, torch.dtype]:
        return self.tensor._version, _address(self.tensor), self.tensor.dtype

    def fresh(self) -> Source:
        """Return the source of the values, also of those that it got while away.

        Raises:
            AccelError: it was written to while it was not in memory, so that the change is lost.
        """
        if not self.changed:
            return self.source
        values, source = self.tensor.detach(), self.source
        if (tuple(values.shape), values.dtype) != (tuple(source.shape), source.dtype):
            raise AccelError(
                f"{self.name} was written to while it is not in memory, or given another dtype or shape:"
                " the change is lost\n"
                "load the model again, and change weights within"
                " accelerator.full_parameters(model, writeback=True), or after accel_big_models.undo(model)"
            )
        return in_memory(values.cpu())

    def whole(self) -> Tensor:
        """Return the values as a CPU tensor.

        Callers at the same time get the same tensor.
        """
        if (source := self.fresh()) is not self.source:
            return values_of(source)
        values = None if self._whole is None else self._whole()
        if values is None:
            values = values_of(self.source)
            self._whole = weakref.ref(values)
        return values


@define(eq=False)
class Group:
    """Weights that come and go with one module's forward.

    outer: they stay while blocks inside the module come and go.
    """

    name: str
    weights: Sequence[Weight]
    outer: bool
    cargo: Cargo = field(init=False)
    users: int = 0
    slot: Slot | None = None
    transfer: Any = None
    next: Group | None = None
    """The one that was entered after it the last time."""

    def __getstate__(self) -> dict[str, Any]:
        return {"name": self.name, "weights": self.weights, "outer": self.outer, "next": self.next}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["name"], state["weights"], state["outer"], next=state["next"])  # type: ignore[misc]

    def __attrs_post_init__(self) -> None:
        self.load()

    def load(self) -> None:
        """Have the weights' present sources as cargo: nothing of it is under way."""
        self.cargo = Cargo(self.name, [weight.source for weight in self.weights])

    def take_writes(self) -> None:
        """Have what was written into weights that are away brought with them.

        Raises:
            AccelError: a weight was not in memory, so that the change is lost.
        """
        written = [weight for weight in self.weights if weight.changed]
        for weight in written:
            weight.source, weight._whole = weight.fresh(), None
        if written:
            self.load()  # what was brought ahead is older


class Engine:
    """Brings the groups of one model to one device, for any number of threads."""

    def __init__(self, device: torch.device, groups: Sequence[Group]) -> None:
        self.device = device
        self.groups = list(groups)
        inner = [group for group in groups if not group.outer]
        for group, following in zip(inner, inner[1:] + inner[:1], strict=True):
            group.next = following if following is not group else None
        self.largest = max((group.cargo.size for group in inner), default=0)
        self._prepare()

    def _prepare(self) -> None:
        self.lock = threading.RLock()
        self.local = threading.local()
        self.mover = Mover(self.device)
        self.slots: list[Slot] = []
        self.turn = 0
        for weight in self.weights:
            weight.leave()

    @property
    def weights(self) -> list[Weight]:
        """All weights that come and go."""
        return [weight for group in self.groups for weight in group.weights]

    # -- around a module's forward ---------------------------------------------------------------

    def enter(self, group: Group) -> None:
        """Bring a group for this thread, and begin to bring the one that follows."""
        with self.lock, torch.inference_mode(False), torch.no_grad():
            if group.users == 0:
                self._bring(group)
            else:
                self.mover.wait(group.transfer)  # it came for another thread, maybe on another stream
            group.users += 1
            if not group.outer:
                self.local.first = getattr(self.local, "first", None) or group
                previous, self.local.previous = getattr(self.local, "previous", None), group
                if previous is not None and previous is not group:
                    previous.next = group
                self._foresee(group)
        entered = ExitStack()
        entered.callback(self._leave, group)
        if torch.is_grad_enabled():
            entered.enter_context(self._saved_anew(group))
        self._stack.append((group, entered))

    def own(self, group: Group, output: Any) -> Any:
        """Return a group's output with its weights, and views of them, copied.

        The next blocks get their memory.
        """
        home = None if group.slot is None else _address(group.slot.buffer)

        def is_view(value: Any) -> bool:
            return isinstance(value, Tensor) and _address(value) == home

        if not home or not any(map(is_view, tensors_in(output))):
            return output
        return ops.recursively_apply(torch.clone, output, test_type=is_view)

    def guard(self, group: Group, output: Any) -> Any:
        """Return a group's output; backward raises if a weight requires a gradient."""
        trained = (
            [weight.name for weight in group.weights if weight.trained] if torch.is_grad_enabled() else []
        )
        if not trained:
            return output
        reminder = torch.zeros((), requires_grad=True)
        return ops.recursively_apply(
            lambda tensor: Refuse.apply(tensor, reminder, trained[0]),  # type: ignore[no-untyped-call]
            output,
            test_type=lambda value: isinstance(value, Tensor) and value.is_floating_point(),
        )

    def leave(self, group: Group) -> None:
        """Let a group go, and what was entered in it and never left."""
        while any(entered is group for entered, _ in self._stack):
            self._stack.pop()[1].close()

    def begin(self) -> None:
        """Begin a forward of the model.

        Weights in host memory may have other values than they had when they were last brought: torch counts
        no writes by way of `.data`.
        """
        self.leave_all()
        self.local.first = None
        with self.lock:
            for slot in self.slots:
                if not slot.used and slot.cargo is not None and slot.cargo.in_memory:
                    slot.cargo = None

    def leave_all(self) -> None:
        """Let go what this thread left behind: an interrupt skips a module's last hooks."""
        while self._stack:
            self._stack.pop()[1].close()

    @property
    def _stack(self) -> list[tuple[Group, ExitStack]]:
        if not hasattr(self.local, "stack"):
            self.local.stack = []
        stack: list[tuple[Group, ExitStack]] = self.local.stack
        return stack

    def _leave(self, group: Group) -> None:
        with self.lock, torch.inference_mode(False), torch.no_grad():
            assert group.slot is not None
            group.users -= 1
            self.mover.note_read(group.slot)
            if group.users:
                return
            changed = [weight.name for weight in group.weights if weight.changed]
            for weight in group.weights:
                weight.leave()
            group.slot.used = False
            if group.outer or changed or group.slot not in self.slots:
                group.slot.cargo = None
                group.slot = None
        if changed:
            raise AccelError(
                f"{changed[0]} was changed in a forward, and lies where changes would be lost\n"
                "keep it on the device: name its module in the device map, or give more memory"
            )

    # -- bringing --------------------------------------------------------------------------------

    def _bring(self, group: Group) -> None:
        group.take_writes()
        slot = group.slot
        try:
            if slot is None or slot.cargo is not group.cargo:
                slot = self._slot(group, may_allocate=True)
                assert slot is not None
                self._start(group, slot)
            slot.used = True
            self.mover.wait(group.transfer)
            for weight, data in zip(group.weights, group.cargo.unpacked(slot.buffer), strict=True):
                weight.come(data)
        except BaseException as error:
            if slot is not None:
                slot.used, slot.cargo = False, None
            group.slot = None
            if isinstance(error, Exception) and is_out_of_memory(error):
                raise torch.OutOfMemoryError(
                    f"no memory on {self.device} for {group.name or 'the model'}, {group.cargo.size} bytes:"
                    f" {error}\n"
                    "keep less on the device: give less of its memory to the plan, or smaller batches"
                ) from error
            raise

    def _start(self, group: Group, slot: Slot) -> None:
        for other in self.groups:
            if other.slot is slot:
                other.slot = None
        group.slot = slot
        self.turn += 1
        slot.turn = self.turn
        group.transfer = self.mover.start(group.cargo, slot)

    def _foresee(self, group: Group) -> None:
        """Begin to bring the next group, and to read the one after it."""
        following = group.next
        if following is None or following.users:
            return
        if following is self.local.first and following.cargo.in_memory:
            return  # the next forward brings what it has then
        if following.slot is None or following.slot.cargo is not following.cargo:
            slot = self._slot(following, may_allocate=False)
            if slot is None:
                return
            self._start(following, slot)
        after = following.next
        if after is not None and after.slot is None and after is not group:
            self.mover.stage(after.cargo)

    def _slot(self, group: Group, *, may_allocate: bool) -> Slot | None:
        """Return a buffer that nobody uses, the one that was filled longest ago."""
        if group.outer:
            return self.mover.slot(group.cargo.size)
        if len(self.slots) < SLOTS:
            self.slots.append(self.mover.slot(self.largest))
            return self.slots[-1]
        idle = [slot for slot in self.slots if not slot.used]
        if idle:
            return min(idle, key=lambda slot: slot.turn)
        # Other threads are in all of them.
        return self.mover.slot(group.cargo.size) if may_allocate else None

    # -- autograd --------------------------------------------------------------------------------

    def _saved_anew(self, group: Group) -> AbstractContextManager[Any]:
        """Have autograd keep sources of weights, not views of reused buffers."""
        groups = [*(entered for entered, _ in self._stack), group]
        homes = {
            each.slot.buffer.untyped_storage().data_ptr(): each for each in groups if each.slot is not None
        }

        def pack(tensor: Tensor) -> Any:
            if is_composed(tensor):
                return tensor, [pack(leaf) for leaf in leaves_of(tensor)]
            home = homes.get(_address(tensor) or 0)
            return tensor if home is None else _Saved.of(tensor, home.cargo, self.device)

        def unpack(kept: Any) -> Tensor:
            if isinstance(kept, tuple):
                return composed(kept[0], map(unpack, kept[1]))
            return kept.values() if isinstance(kept, _Saved) else kept

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def hold(self, *, unwritten: bool) -> None:
        """Keep weights as tensors that others may write to, and compute with these.

        What has to be read is read into host memory for good. unwritten: False before others get the
        tensors; True afterwards, when files are no longer asked for their values.
        """
        with self.lock, torch.inference_mode(False), torch.no_grad():
            self.leave_all()
            for group in self.groups:
                for weight in group.weights:
                    weight.source = weight.fresh()
                    if weight.source.tensor() is None or unwritten:
                        values = values_of(weight.source)
                        weight.source = in_memory(values)
                    if not group.users:
                        weight.leave()
                group.load()

    # -- copies and the end ----------------------------------------------------------------------

    def close(self) -> None:
        """Have all weights away for good, and give the device's memory back."""
        self.leave_all()
        self.mover.close()
        with self.lock:
            for group in self.groups:
                group.slot = None
            self.slots.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {"device": self.device, "groups": self.groups, "largest": self.largest}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._prepare()


@frozen
class _Saved:
    """A weight, or a view of one, that a backward pass needs."""

    source: Source
    device: torch.device
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor, cargo: Cargo, device: torch.device) -> _Saved | Tensor:
        first = tensor.storage_offset() * tensor.element_size()
        number = bisect_right(cargo.starts, first) - 1
        source, start = cargo.sources[number], cargo.starts[number]
        if source.dtype != tensor.dtype:
            return tensor.clone()
        offset = (first - start) // tensor.element_size()
        return cls(source, device, tuple(tensor.shape), tuple(tensor.stride()), offset)

    def values(self) -> Tensor:
        """Bring the weight again."""
        values = values_of(self.source).detach().to(self.device).reshape(-1)
        return values.as_strided(self.shape, self.strides, self.offset)


def _address(tensor: Tensor) -> int | None:
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # tensors without memory of their own
        return None


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors of a structure."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from tensors_in(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from tensors_in(value)
    elif is_dataclass(tree) and not isinstance(tree, type):
        yield from tensors_in([getattr(tree, each.name) for each in fields(tree)])


class Refuse(torch.autograd.Function):
    """Passes an output on, and raises where a weight's gradient would be lost."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, reminder: Tensor, name: str) -> Tensor:  # noqa: ARG004
        """Return the output. reminder: requires a gradient, so that the output does."""
        ctx.name = name
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:  # noqa: ARG004
        """Raise AccelError."""
        raise AccelError(
            f"{ctx.name} requires a gradient, and is not on the device to be trained: its values"
            " come and go\n"
            f"keep it on the device, or freeze it: model.get_parameter({ctx.name!r}).requires_grad_(False)"
        )

"""A model cut into pipeline stages.

Its names stay whole, and a rank keeps the weights of its own stages.

The model's own forward runs on every rank. Modules of earlier stages are passed over; the first
module of the stage is given the tensor that the stage before sent; the first module of the next stage ends
the forward with the tensor to be sent. So nothing is traced, and nothing of the model is written anew.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any, Final

import torch
from torch import Tensor, nn

from accel_core import AccelError, ConfigError
from accel_fsdp.classes import become, mark_absent
from accel_fsdp.pipeline.passed import Passed, Running, received_by, refusal, unpassable

__all__ = ["Left", "cut", "note_hooks_of_plugins", "points_of"]


OF_OUTPUTS: Final = ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
"""A module's hooks that are given its outputs, or their gradients."""


class Left(BaseException):
    """A stage's forward has reached the next stage: no error, but the way out of it."""

    def __init__(self, activation: Tensor) -> None:
        super().__init__()
        self.activation = activation


class _Piece:
    """Put before a module's class: all of the module is of one stage."""

    _running: Running
    _stage: int
    _name: str
    _entry: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        running = self._running
        if running.stage is None and self._entry:  # a checkpoint computes it again
            return super().__call__(*received_by(args), **kwargs)  # type: ignore[misc]
        if running.stage is None or (self._stage == running.stage and running.entered):
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        if self._stage == running.stage and self._entry:
            running.entered = True
            return super().__call__(running.received, *args[1:], **kwargs)  # type: ignore[misc]
        if self._stage == running.stage + 1 and self._entry and running.entered:
            raise self._left_with(args)
        if self._stage < running.stage and not running.entered:
            return running.received if torch.compiler.is_compiling() else running.passed
        raise AccelError(
            f"pipeline: {self._name} is of stage {self._stage}, by where the model registers it, but its turn"
            f" comes in stage {running.stage}\nregister modules in the order in which forward calls them, or"
            " split the model elsewhere (fsdp.pp_split_points)"
        )

    def _left_with(self, args: Sequence[Any]) -> Left:
        """Return the way out of the stage before this module's."""
        if not args:
            raise AccelError(
                f"pipeline: {self._name}, where stage {self._stage} begins, is called without a positional"
                " argument, which is what stages send\n"
                "pass activations first and by position, or split the model elsewhere (fsdp.pp_split_points)"
            )
        if isinstance(args[0], Passed):
            raise refusal(self._running, "sends")
        if not isinstance(args[0], Tensor):
            raise AccelError(
                f"pipeline: {self._name}, where stage {self._stage} begins, is called with a"
                f" {type(args[0]).__name__} first, and stages send one tensor\n"
                "pass activations as a tensor, or split the model elsewhere (fsdp.pp_split_points)"
            )
        return Left(args[0])


class _Root:
    """Put before the model's class."""

    _running: Running
    _last: int
    """The stage that gives the model's outputs."""
    _of_users: frozenset[int]
    """Hooks from before the cut."""
    _of_plugins: frozenset[int] = frozenset()
    _left: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        except Left as left:  # hooks of sharded modules must see the tensor that is sent
            self._left = left.activation
            return left.activation
        except Exception as error:
            if self._running.entered or isinstance(error, AccelError):
                raise
            raise unpassable(self._running, type(self).__name__, error) from error

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._running.stage is None:
            raise AccelError(
                f"pipeline: {type(self).__name__} is spread over ranks, and cannot be called on one\n"
                "use accelerator.forward_backward(model, batches, forward_loss), with forward_only=True to"
                " evaluate"
            )
        self._refuse_backward_hooks(args)
        self._left = None
        self._running.draws.note_call()
        with nullcontext() if self._running.stage == self._last else self._without_hooks_of_users():
            found = super().__call__(*args, **kwargs)  # type: ignore[misc]
        if self._left is not None:
            dtype, self._left = self._left.dtype, None
            raise Left(found.to(dtype))  # in the model's dtype, not the one that FSDP gives outputs
        self._running.draws.note_end()
        return found

    def _refuse_backward_hooks(self, inputs: Sequence[Any]) -> None:
        needs_gradient = (isinstance(each, Tensor) and each.requires_grad for each in inputs)
        if self.__dict__["_backward_hooks"] and any(needs_gradient) and torch.is_grad_enabled():
            raise AccelError(
                f"pipeline: a backward hook of {type(self).__name__}, whose input requires a gradient, is"
                " never called, as no stage has its inputs and its outputs\n"
                "put the hook on modules inside it, or detach the input"
            )

    @contextmanager
    def _without_hooks_of_users(self) -> Iterator[None]:
        """Run a stage whose outputs are not the model's.

        Hooks of plugins are for the tensor that it sends, too.
        """
        held = {
            kind: hooks
            for kind in OF_OUTPUTS
            if not self._of_plugins.issuperset(hooks := self.__dict__[kind])
        }
        for kind, hooks in held.items():
            kept = ((key, hook) for key, hook in hooks.items() if key in self._of_plugins)
            self.__dict__[kind] = OrderedDict(kept)
        try:
            yield
        finally:
            self.__dict__.update(held)


def note_hooks_of_plugins(model: nn.Module) -> None:
    """Count the hooks that the model got since the cut as hooks of plugins."""
    assert isinstance(model, _Root)
    model._of_plugins = _hooks(model) - model._of_users


def _hooks(module: Any) -> frozenset[int]:
    return frozenset(chain(*(module.__dict__[kind] for kind in OF_OUTPUTS)))


def points_of(model: nn.Module, named: Sequence[str], stages: int) -> list[str]:
    """Names of the modules at which stages but the first begin.

    The modules of `named`, or the model's own `pp_split_points`, or even cuts of its longest list of modules.

    Raises:
        ConfigError: there is no such module, or no list to cut.
    """
    points = list(named) or list(getattr(model, "pp_split_points", ()))
    modules = dict(model.named_modules())
    if not points:
        kinds = (nn.ModuleList, nn.Sequential)
        lists = {name: [*module._modules] for name, module in modules.items() if isinstance(module, kinds)}
        longest = max(lists, key=lambda name: len(lists[name]), default="")
        parts = lists.get(longest, [])
        length = len(parts)
        if length < stages:
            raise ConfigError(
                f"{type(model).__name__} has no list of modules that could be cut into {stages} stages\n"
                "name the modules at which stages begin: fsdp.pp_split_points, or the model's pp_split_points"
            )
        points = [f"{longest}.{parts[stage * length // stages]}".lstrip(".") for stage in range(1, stages)]
    if unknown := [name for name in points if name not in modules]:
        raise ConfigError(
            f"fsdp.pp_split_points: {type(model).__name__} has no module {unknown[0]!r}\n"
            f"it has {', '.join(list(modules)[1:20])}, ..."
        )
    return points


def cut(
    model: nn.Module, points: Sequence[str], mine: Sequence[int]
) -> tuple[Running, dict[int, list[nn.Module]]]:
    """Let the model run by stages, and drop weights of all stages but `mine`.

    Returns the switch, and the pieces by stage. A weight of several stages stays with each of them.

    Raises:
        ConfigError: a module is of several stages, or has weights of its own and is cut.
    """
    running = Running()
    pieces: dict[int, list[nn.Module]] = {stage: [] for stage in range(len(points) + 1)}
    for name, module, stage in _pieces(model, points):
        pieces[stage].append(module)
        become(module, _Piece, _running=running, _stage=stage, _name=name, _entry=name in points)
    become(model, _Root, _running=running, _last=len(points), _of_users=_hooks(model))
    _refuse_two_turns(model, pieces)
    kept = {
        each for stage in mine for piece in pieces[stage] for each in (*piece.modules(), *_tensors(piece))
    }
    for module in chain(
        *(piece.modules() for stage in pieces if stage not in mine for piece in pieces[stage])
    ):
        if module not in kept:
            mark_absent(module)
        for tensor in _tensors(module):
            if not tensor.is_meta and tensor not in kept:
                _empty(tensor)
    return running, pieces


def _pieces(model: nn.Module, points: Sequence[str]) -> Iterator[tuple[str, nn.Module, int]]:
    """(name, module, stage) of the largest modules inside one stage.

    They have weights and can be called.
    """
    stage, started = 0, set[str]()
    stack = [("", model)]
    while stack:
        name, module = stack.pop()
        if name in points and name not in started:
            started.add(name)
            stage += 1
        inner = [point for point in points if point.startswith(f"{name}." if name else "")]
        if name and not inner and not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            if name in points or _has_state(module):
                yield name, module, stage
            continue
        if any(value is not None for value in module._parameters.values()):
            raise ConfigError(
                f"pipeline: {type(module).__name__} is cut into stages, and has weights of its own:"
                f" {', '.join(module._parameters)}\nput them into a module inside it"
            )
        children = [(f"{name}.{child}" if name else child, value) for child, value in module.named_children()]
        stack.extend(reversed(children))


def _has_state(module: nn.Module) -> bool:
    """Return True if only the rank with the module's stage may run it."""
    kept = (set(each._buffers) - each._non_persistent_buffers_set for each in module.modules())
    return any(True for _ in module.parameters()) or any(kept)


def _refuse_two_turns(model: nn.Module, pieces: Mapping[int, Sequence[nn.Module]]) -> None:
    names = {module: name for name, module in model.named_modules()}
    home: dict[nn.Module, int] = {}
    for stage, modules in pieces.items():
        for module in chain(*(piece.modules() for piece in modules)):
            if home.setdefault(module, stage) != stage and (module in modules or module._parameters):
                raise ConfigError(
                    f"pipeline: {names[module]} is one module of stages {home[module]} and {stage}\n"
                    "make it two modules, which may share their weights"
                )


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _empty(tensor: Tensor) -> None:
    # The same object goes on: optimizers hold it, and its name and shape stay known on every rank.
    data: Tensor = torch.empty_like(tensor, device="meta")
    if isinstance(tensor, nn.Parameter):
        data = nn.Parameter(data, requires_grad=tensor.requires_grad)
    torch.utils.swap_tensors(tensor, data)

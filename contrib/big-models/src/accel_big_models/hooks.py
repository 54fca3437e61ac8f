"""Hooks of modules: weights come before a forward, and go after it."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch._compile import _disable_dynamo  # unlike torch.compiler.disable, imports no compiler at once

from accel_big_models.engine import Engine, Group, tensors_in
from accel_core import ops

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["Enter", "attach", "detach", "enters_of"]


def _outside_graphs(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Keep a hook out of graphs.

    Torch's own way imports the compiler, 110 MB and seconds, with the first call. Nothing is compiled while
    nobody else has imported it.
    """
    apart = _disable_dynamo(hook)

    @functools.wraps(hook)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (apart if "torch._dynamo" in sys.modules else hook)(*args, **kwargs)

    return call


class Enter:
    """Before a module's forward: brings its group, and moves its inputs.

    device: None if inputs are where they have to be. root: the model itself, whose outputs return to the
    device of its inputs. skip_keys: keys of mappings whose values stay where they are.
    """

    places_weights = "accel_big_models"
    """Tells core what places the weights, so that `prepare` does not."""

    @property
    def weight_away(self) -> str | None:
        """Tell core of a weight whose values its parameter does not have now."""
        weights = () if self.engine is None else self.engine.weights
        return next((weight.name for weight in weights if weight.source.tensor() is None), None)

    def __init__(
        self,
        engine: Engine | None,
        group: Group | None,
        device: torch.device | None,
        *,
        root: bool,
        skip_keys: Sequence[str] = (),
    ) -> None:
        self.engine, self.group, self.device, self.root = engine, group, device, root
        self.skip_keys = skip_keys
        self.local = threading.local()
        """The device of the inputs of a thread's current forward."""

    @_outside_graphs
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.root and self.engine is not None:
            self.engine.begin()
        if self.root:
            came = next(tensors_in((args, kwargs)), None)
            self.local.device = None if came is None else came.device
        if self.device is not None:
            args, kwargs = ops.send_to_device((args, kwargs), self.device, skip_keys=self.skip_keys)
        if self.engine is not None and self.group is not None:
            self.engine.enter(self.group)
        return args, kwargs

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "local"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


class Leave:
    """After a module's forward, or its error: lets the group go."""

    def __init__(self, enter: Enter) -> None:
        self.enter = enter

    @_outside_graphs
    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        engine, group = self.enter.engine, self.enter.group
        if engine is not None and group is not None:
            output = engine.guard(group, engine.own(group, output))
            engine.leave(group)
        if not self.enter.root:
            return output
        if engine is not None:
            engine.mover.settle()
        device, gone = getattr(self.enter.local, "device", None), next(tensors_in(output), None)
        if device is None or gone is None:
            return output
        return ops.send_to_device(output, device, skip_keys=self.enter.skip_keys)


class _Around:
    """A compiled block's call: weights come and go around the graph, which stays one."""

    def __init__(self, enter: Enter, module: nn.Module, compiled: Any) -> None:
        self.enter, self.leave, self.module, self.compiled = enter, Leave(enter), module, compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self.enter(self.module, args, kwargs)
        output = None
        try:
            output = self.compiled(*args, **kwargs)
        finally:
            output = self.leave(self.module, args, kwargs, output)
        return output


def attach(module: nn.Module, enter: Enter) -> None:
    """Have a module's forward enter and leave."""
    if module._compiled_call_impl is not None:
        module._compiled_call_impl = _Around(enter, module, module._compiled_call_impl)
        return
    module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
    module.register_forward_hook(Leave(enter), with_kwargs=True, always_call=True)


def detach(module: nn.Module) -> None:
    """Undo `attach`."""
    if isinstance(module._compiled_call_impl, _Around):
        module._compiled_call_impl = module._compiled_call_impl.compiled
    for hooks, kinds in (
        (module._forward_pre_hooks, (module._forward_pre_hooks_with_kwargs,)),
        (module._forward_hooks, (module._forward_hooks_with_kwargs, module._forward_hooks_always_called)),
    ):
        for key in [key for key, hook in hooks.items() if isinstance(hook, (Enter, Leave))]:
            del hooks[key]
            for kind in kinds:
                kind.pop(key, None)


def enters_of(model: nn.Module) -> list[Enter]:
    """Return what is attached to the model's modules."""
    found = []
    for module in model.modules():
        if isinstance(module._compiled_call_impl, _Around):
            found.append(module._compiled_call_impl.enter)
        found += [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, Enter)]
    return found

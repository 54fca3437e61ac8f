"""From plugin instances to callables: who owns a hook, who refines it, what lies below.

Specs and implementations carry pluggy's marks, but nothing is called through pluggy: its
first-result call would run `backward` twice when a hook returns None, and its `tryfirst` beats
our layers (docs/decisions).
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any, Final, TypeVar

import pluggy
from attrs import frozen

from accel_core.contract import hooks as hookspecs
from accel_core.contract.spec import Spec
from accel_core.contract.suggest import did_you_mean
from accel_core.errors import PluginError
from accel_core.plugins.combining import ANSWERS, Implementation, wrap

__all__ = ["LAYERS", "Binder", "Hooks", "Registered", "Steps", "no_op"]

LAYERS: Final[Mapping[str, int]] = {
    "base": 0,
    "device": 1,
    "precision": 2,
    "strategy": 3,
    "launcher": 3,
    "extension": 4,
    "tracker": 5,
}

F = TypeVar("F", bound=Callable[..., Any])


def no_op(method: F) -> F:
    """Mark a default that is what core does without asking: per-step calls to it are left out."""
    method.accel_no_op = True  # type: ignore[attr-defined]
    return method


@frozen
class Registered:
    """A plugin instance's implementations by hook name."""

    name: str
    layer: int
    methods: Mapping[str, Callable[..., Any]]


@frozen
class _Hook:
    """What binding needs to know of a spec."""

    spec: Spec
    parameters: tuple[str, ...]
    answer: str
    """How answers combine: "wrapper", or the outer word of the return type."""


@cache
def _read_specs(module: ModuleType) -> Mapping[str, _Hook]:
    """The hooks of a contract; read once a process."""
    manager = pluggy.PluginManager("accel_core")
    manager.add_hookspecs(module)
    hooks = {}
    for name, function in vars(module).items():
        spec = getattr(function, "accel_spec", None)
        if spec is not None:
            # Annotations are text (PEP 563): "Mapping[str, str]" -> "Mapping".
            outer = str(function.__annotations__["return"]).partition("[")[0]
            answer = "wrapper" if spec.kind == "wrapper" else outer
            hooks[name] = _Hook(spec, tuple(getattr(manager.hook, name).spec.argnames), answer)
    return hooks


class Binder:
    """Checks plugin instances against the specs of a module and adapts their methods."""

    def __init__(self, specs: ModuleType = hookspecs) -> None:
        self._hooks = _read_specs(specs)
        self.specs: Mapping[str, Spec] = {name: hook.spec for name, hook in self._hooks.items()}

    def register(self, plugin: object, *, name: str, slot: str, origin: str = "accel-core") -> Registered:
        """Check every hook of `plugin` and give its methods, adapted to the specs' parameters.

        Raises:
            PluginError: a hook that does not exist, a parameter the spec does not have, an order
                mark, or a hook that the plugin's slot may not implement.
        """
        refuse = _Refusal(name, slot, origin)
        methods: dict[str, Callable[..., Any]] = {}
        for attribute, mark in _marks(type(plugin), refuse).items():
            hook = mark.get("specname") or attribute
            self._check(refuse, hook, mark, slot)
            if hook in methods:
                raise refuse(hook, f"a second method implements it: {attribute}")
            methods[hook] = self._adapt(refuse, hook, getattr(plugin, attribute))
        if slot != "tracker":  # a tracker of a user's own may call its methods as it likes
            self._refuse_unmarked(type(plugin), methods, refuse)
        return Registered(name, LAYERS[slot], methods)

    def _refuse_unmarked(self, cls: type, methods: Mapping[str, Any], refuse: _Refusal) -> None:
        """A method with a hook's name and parameters, and without the mark, would never be called."""
        for hook in self._hooks.keys() - methods.keys():
            method = getattr(cls, hook, None)
            if inspect.isfunction(method) and {*inspect.signature(method).parameters} <= {
                "self",
                *self._hooks[hook].parameters,
            }:
                raise refuse(hook, f"the method {hook} is not marked; write @implements(hooks.{hook})")
        for name, method in inspect.getmembers(cls, inspect.isfunction):
            if (
                not name.startswith("_")
                and name not in self._hooks
                and not hasattr(method, "accel_core_impl")
            ):
                self._refuse_misspelt(name, {*inspect.signature(method).parameters} - {"self"}, refuse)

    def _refuse_misspelt(self, name: str, taken: set[str], refuse: _Refusal) -> None:
        """An unmarked method with the parameters of a hook of almost its name was meant to be that hook."""
        alike = [hook for hook, known in self._hooks.items() if taken and taken == {*known.parameters}]
        for hook in difflib.get_close_matches(name, alike, 1, 0.9):
            raise refuse(
                hook, f"the method {name} is never called; write @implements(hooks.{hook}), or rename it"
            )

    def hooks(self, registered: Sequence[Registered]) -> Hooks:
        """The hooks as answered by these plugins; order among equals is the order given."""
        return Hooks(self, sorted(registered, key=lambda plugin: plugin.layer))

    def combine(self, hook: str, found: Sequence[Implementation]) -> Callable[..., Any]:
        """One callable with the spec's parameters for what these implementations answer together."""
        known = self._hooks[hook]
        if known.spec.kind == "owner":
            return found[-1].call
        busy = [implementation for implementation in found if not implementation.idle]
        if len(busy) == 1 and known.answer in ("Callable", "None"):
            return busy[0].call  # combining would not change its answer
        if known.spec.refines is not None:
            combined = wrap(hook, busy, known.parameters.index(known.spec.refines))
        else:
            combined = ANSWERS[known.answer](hook, busy)
        return _with_parameters(hook, known.parameters, known.parameters, combined)

    def _check(self, refuse: _Refusal, hook: str, mark: Mapping[str, Any], slot: str) -> None:
        if hook not in self.specs:
            raise refuse(hook, f"there is no such hook{did_you_mean(hook, self.specs)}")
        spec = self.specs[hook]
        order = [word for word in ("tryfirst", "trylast", "wrapper", "hookwrapper") if mark.get(word)]
        if order:
            raise refuse(
                hook, f"the mark {order[0]} is refused: layers decide the order, `self.below` goes on"
            )
        if slot == "tracker" and not spec.observer:
            raise refuse(hook, "a tracker implements observers only")
        if slot == "extension" and spec.kind == "owner":
            raise refuse(hook, "an extension implements no owner hook; make it a strategy, or refine a value")

    def _adapt(self, refuse: _Refusal, hook: str, method: Callable[..., Any]) -> Callable[..., Any]:
        wanted = self._hooks[hook].parameters
        taken = _parameters(refuse, hook, method)
        for parameter in taken:
            if parameter not in wanted:
                raise refuse(
                    hook, f"the spec has no parameter {parameter!r}{did_you_mean(parameter, wanted)}"
                )
        if taken == wanted:
            return method
        return _with_parameters(hook, wanted, taken, method)


class _Refusal:
    def __init__(self, plugin: str, slot: str, origin: str) -> None:
        self.plugin, self.slot, self.origin = plugin, slot, origin

    def __call__(self, hook: str, problem: str) -> PluginError:
        return PluginError(
            f"{self.slot} plugin {self.plugin!r} ({self.origin}), hook {hook}: {problem}",
            plugin=self.plugin,
            hook=hook,
            distribution=self.origin,
        )


def _marks(cls: type, refuse: _Refusal) -> dict[str, Mapping[str, Any]]:
    """Attribute -> the options that pluggy's marker left on it, inherited ones included.

    pluggy's own walk costs ten times as much and does not see the mistake refused here.
    """
    found: dict[str, Mapping[str, Any]] = {}
    for parent in reversed(cls.__mro__):
        for attribute, value in vars(parent).items():
            mark = getattr(value, "accel_core_impl", None)
            if isinstance(mark, dict):
                found[attribute] = mark
            elif attribute in found and value is None:
                del found[attribute]
            elif attribute in found:
                hook = str(found[attribute].get("specname") or attribute)
                raise refuse(
                    hook,
                    f"{parent.__name__}.{attribute} overrides it unmarked; write @implements(hooks.{hook})",
                )
    return found


def _parameters(refuse: _Refusal, hook: str, method: Callable[..., Any]) -> tuple[str, ...]:
    parameters = inspect.signature(method).parameters.values()
    for parameter in parameters:
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD or parameter.default is not parameter.empty:
            raise refuse(
                hook,
                f"parameter {parameter} is not plain: write it without star, slash, default or keyword-only",
            )
    return tuple(parameter.name for parameter in parameters)


def _with_parameters(
    hook: str, wanted: Sequence[str], taken: Sequence[str], call: Callable[..., Any]
) -> Callable[..., Any]:
    """`call`, which takes some of the spec's parameters in an order of its own, taking all of them.

    Generated, because it stands in every step: a closure with *args costs four times as much.
    """
    code = _adapter_code(hook, tuple(wanted), tuple(taken))
    adapter: Callable[..., Any] = eval(code, {"call": call})  # noqa: S307  all names in it are our specs'
    adapter.__wrapped__ = call  # type: ignore[attr-defined]
    adapter.accel_no_op = getattr(call, "accel_no_op", False)  # type: ignore[attr-defined]
    return adapter


@cache
def _adapter_code(hook: str, wanted: tuple[str, ...], taken: tuple[str, ...]) -> CodeType:
    source = f"lambda {', '.join(wanted)}: call({', '.join(taken)})"
    return compile(source, f"<adapter of hook {hook}>", "eval")


class Hooks:
    """The hooks of a stack, each an attribute to call; resolved on first use."""

    def __init__(self, binder: Binder, registered: Sequence[Registered]) -> None:
        self._binder = binder
        self._registered = tuple(registered)

    def implementations(self, hook: str) -> list[Implementation]:
        """Who implements the hook, bottom layer first."""
        return [
            Implementation(plugin.name, plugin.layer, plugin.methods[hook])
            for plugin in self._registered
            if hook in plugin.methods
        ]

    def under(self, layer: int) -> Hooks:
        """The same hooks, answered by the layers below `layer`."""
        return Hooks(self._binder, [plugin for plugin in self._registered if plugin.layer < layer])

    def owner(self, hook: str) -> Implementation | None:
        """The topmost implementation of an owner hook."""
        found = self.implementations(hook)
        return found[-1] if found else None

    def step(self, hook: str) -> Callable[..., Any] | None:
        """What to call each step; None where all that would be called is marked as doing nothing."""
        found = self.implementations(hook)
        if self._binder.specs[hook].kind == "owner":
            found = found[-1:]
        return None if all(implementation.idle for implementation in found) else getattr(self, hook)

    def __getattr__(self, hook: str) -> Any:
        if hook.startswith("_"):
            raise AttributeError(hook)
        specs = self._binder.specs
        if hook not in specs:
            raise AttributeError(f"there is no hook {hook!r}{did_you_mean(hook, specs)}")
        found = self.implementations(hook)
        if not found and specs[hook].kind == "owner":
            stack = " + ".join(plugin.name for plugin in self._registered) or "an empty stack"
            raise PluginError(
                f"hook {hook}: no plugin of {stack} implements it\nadd one that does to the stack", hook=hook
            )
        resolved = self._binder.combine(hook, found)
        setattr(self, hook, resolved)
        return resolved


class Steps:
    """A unit's per-step hooks, bound: an attribute a hook, None where there is nothing to do."""

    __slots__ = tuple(
        name
        for name, value in vars(hookspecs).items()
        if getattr(getattr(value, "accel_spec", None), "per_step", False)
    )

    def __init__(self, hooks: Hooks) -> None:
        for hook in self.__slots__:
            setattr(self, hook, hooks.step(hook))

    if TYPE_CHECKING:  # slots are made from the specs; at run time this would slow each look-up

        def __getattr__(self, hook: str) -> Any: ...

"""From plugin instances to callables: who owns a hook, who refines it, what lies below.

pluggy registers and validates implementations; nothing is called through it, because its
first-result call would run `backward` twice when a hook returns None, and its `tryfirst` beats
our layers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, TypeVar

import pluggy
from attrs import frozen

from accel_core import hookspecs
from accel_core.errors import PluginError
from accel_core.plugins import near

if TYPE_CHECKING:
    from collections.abc import Iterator

    from accel_core.hookspecs import Spec

__all__ = ["LAYERS", "Binder", "Hooks", "Implementation", "Steps", "no_op"]

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
    """Mark a default that does nothing: per-step calls to it are left out altogether."""
    method.accel_no_op = True  # type: ignore[attr-defined]
    return method


@frozen
class Implementation:
    """One plugin's method for one hook."""

    plugin: str
    layer: int
    call: Callable[..., Any]


@frozen
class Registered:
    """A plugin instance and its implementations by hook name."""

    name: str
    layer: int
    methods: Mapping[str, Callable[..., Any]]


class Binder:
    """Validates plugin instances against the specs of a module and adapts their methods.

    One a run: a plugin instance may be registered once.
    """

    def __init__(self, specs: ModuleType = hookspecs) -> None:
        self._manager = pluggy.PluginManager("accel_core")
        self._manager.add_hookspecs(specs)
        self.specs: dict[str, Spec] = {
            name: function.accel_spec for name, function in vars(specs).items() if hasattr(function, "accel_spec")
        }
        self._parameters = {name: _parameters(getattr(specs, name)) for name in self.specs}
        self._answers = {name: _answer_kind(getattr(specs, name)) for name in self.specs}

    def register(self, plugin: object, *, name: str, slot: str, origin: str = "accel-core") -> Registered:
        """Check every hook of `plugin` and give its methods, adapted to the specs' parameters.

        Raises:
            PluginError: a hook that does not exist, a parameter the spec does not have, an order
                mark, or a hook that the plugin's slot may not implement.
        """
        refuse = _Refusal(name, slot, origin)
        methods: dict[str, Callable[..., Any]] = {}
        for attribute in dir(type(plugin)):
            options = self._manager.parse_hookimpl_opts(plugin, attribute)
            if options is None:
                continue
            hook = options.get("specname") or attribute
            if hook not in self.specs:
                raise refuse(hook, f"there is no such hook{near(hook, self.specs)}")
            if options["tryfirst"] or options["trylast"] or options["wrapper"] or options["hookwrapper"]:
                raise refuse(hook, "tryfirst, trylast and wrapper marks are refused: layers decide the order")
            self._check_slot(refuse, hook, slot)
            methods[hook] = self._adapt(refuse, hook, getattr(plugin, attribute))
        # pluggy's own validation and events; its message is kept as the cause.
        try:
            self._manager.register(plugin, f"{name}#{id(plugin)}")
        except pluggy.PluginValidationError as error:
            raise refuse("?", str(error)) from error
        return Registered(name, LAYERS[slot], methods)

    def hooks(self, registered: Sequence[Registered]) -> Hooks:
        """The hooks as answered by these plugins; order among equals is the order given."""
        return Hooks(self, sorted(registered, key=lambda plugin: plugin.layer))

    def _check_slot(self, refuse: _Refusal, hook: str, slot: str) -> None:
        spec = self.specs[hook]
        if slot == "tracker" and not spec.observer:
            raise refuse(hook, "a tracker implements observers only")
        if slot == "extension" and spec.kind == "owner":
            raise refuse(hook, "an extension implements no owner hook; make it a strategy, or refine a value")

    def _adapt(self, refuse: _Refusal, hook: str, method: Callable[..., Any]) -> Callable[..., Any]:
        wanted = self._parameters[hook]
        taken = []
        for parameter in inspect.signature(method).parameters.values():
            if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD or parameter.default is not parameter.empty:
                raise refuse(hook, f"parameter {parameter} must be plain: no *, no default, no keyword-only")
            if parameter.name not in wanted:
                raise refuse(hook, f"the spec has no parameter {parameter.name!r}{near(parameter.name, wanted)}")
            taken.append(parameter.name)
        if tuple(taken) == wanted:
            return method
        # A lambda costs 30 ns a call; a wrapper with *args would cost four times that.
        source = f"lambda {', '.join(wanted)}: method({', '.join(f'{name}={name}' for name in taken)})"
        adapter: Callable[..., Any] = eval(source, {"method": method})  # names come from our own specs
        return adapter


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

    def __getattr__(self, hook: str) -> Any:
        if hook.startswith("_") or hook not in self._binder.specs:
            raise AttributeError(f"there is no hook {hook!r}{near(hook, self._binder.specs)}", name=hook, obj=self)
        resolved = self._resolve(hook)
        setattr(self, hook, resolved)
        return resolved

    def _resolve(self, hook: str) -> Callable[..., Any]:
        spec = self._binder.specs[hook]
        found = self.implementations(hook)
        if spec.kind == "owner":
            if not found:
                raise PluginError(f"no plugin of this stack implements {hook}", hook=hook)
            return found[-1].call
        if spec.kind == "wrapper":
            return _wrap(found, self._binder._parameters[hook], str(spec.refines))
        return _ANSWERS[self._binder._answers[hook]](hook, found)


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    # Not inspect.signature: 60 specs a run, and a code object already knows.
    code = function.__code__
    return code.co_varnames[: code.co_argcount]


def _answer_kind(spec: Callable[..., Any]) -> str:
    # Specs are annotated lazily (PEP 563), so the annotation is its source text.
    return str(spec.__annotations__.get("return", "None")).partition("[")[0]


def _wrap(found: Sequence[Implementation], parameters: Sequence[str], refined: str) -> Callable[..., Any]:
    position = parameters.index(refined)

    def refine(*arguments: Any) -> Any:
        values = list(arguments)
        for implementation in found:
            values[position] = implementation.call(*values)
        return values[position]

    return refine


def _merge(hook: str, found: Sequence[Implementation]) -> Callable[..., Mapping[str, Any]]:
    def call(*arguments: Any) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        source: dict[str, str] = {}
        for implementation in found:
            for key, value in (implementation.call(*arguments) or {}).items():
                if key in merged and merged[key] != value:
                    raise PluginError(
                        f"{hook}: {source[key]} says {key}={merged[key]!r}, {implementation.plugin} says {value!r}",
                        plugin=implementation.plugin,
                        hook=hook,
                    )
                merged[key] = value
                source[key] = implementation.plugin
        return merged

    return call


def _concatenate(hook: str, found: Sequence[Implementation]) -> Callable[..., list[Any]]:
    return lambda *arguments: [item for each in found for item in each.call(*arguments) or ()]


def _enter(hook: str, found: Sequence[Implementation]) -> Callable[..., AbstractContextManager[Any]]:
    @contextmanager
    def call(*arguments: Any) -> Iterator[None]:
        with ExitStack() as stack:
            for implementation in found:
                context = implementation.call(*arguments)
                if context is not None:
                    stack.enter_context(context)
            yield

    return call


def _compose(hook: str, found: Sequence[Implementation]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Callable[[], AbstractContextManager[Any]] | None:
        factories = [factory for each in found if (factory := each.call(*arguments)) is not None]
        if len(factories) < 2:
            return factories[0] if factories else None

        @contextmanager
        def composed() -> Iterator[None]:
            with ExitStack() as stack:
                for factory in factories:
                    stack.enter_context(factory())
                yield

        return composed

    return call


def _agree(hook: str, found: Sequence[Implementation]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        answers = [(each.plugin, answer) for each in found if (answer := each.call(*arguments)) is not None]
        for plugin, answer in answers[1:]:
            if answer != answers[0][1]:
                raise PluginError(
                    f"{hook}: {answers[0][0]} says {answers[0][1]!r}, {plugin} says {answer!r}", plugin=plugin, hook=hook
                )
        return answers[0][1] if answers else None

    return call


_ANSWERS: Final[Mapping[str, Callable[[str, Sequence[Implementation]], Callable[..., Any]]]] = {
    "Mapping": _merge,
    "Sequence": _concatenate,
    "AbstractContextManager": _enter,
    "Callable": _compose,
    "None": _agree,
}


class Steps:
    """A unit's per-step hooks, bound: an attribute a hook, None where there is nothing to do."""

    __slots__ = tuple(
        name for name, value in vars(hookspecs).items() if getattr(getattr(value, "accel_spec", None), "per_step", False)
    )

    def __init__(self, hooks: Hooks) -> None:
        for hook in self.__slots__:
            found = hooks.implementations(hook)
            idle = not found or getattr(found[-1].call, "accel_no_op", False)
            setattr(self, hook, None if idle else getattr(hooks, hook))

    def __getattr__(self, hook: str) -> Any:  # for type checkers: slots are made from the specs
        raise AttributeError(hook)

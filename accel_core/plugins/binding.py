"""Binding of plugin instances to the hooks of the contract.

Specs and implementations carry pluggy's marks, but nothing is called through pluggy: its
first-result call would run `backward` twice when a hook returns None, and its `tryfirst` beats
our layers (docs/decisions).
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from accel_core.contract import hooks as hookspecs
from accel_core.contract.arguments import did_you_mean
from accel_core.contract.spec import Asked, Spec, parameters_of
from accel_core.errors import PluginError
from accel_core.plugins.combining import ANSWERS, Implementation, of_owner, wrap

LAYERS: Final[Mapping[str, int]] = {
    "base": 0,
    "device": 1,
    "precision": 2,
    "strategy": 3,
    "launcher": 3,
    "store": 3,
    "extension": 4,
    "tracker": 5,
}

ASKED: Final[Mapping[str, Asked | None]] = {"base": None, "launcher": "launcher", "store": "store"}
"""Slot -> what its hooks are asked as; None: any, "run" where it is left out."""

HOME: Final[Mapping[Asked, str]] = {
    "run": "plugins that take part in a run",
    "launch class": "the class that the card names as `launch`",
    "launcher": "launchers",
    "store": "stores",
}

_STARRED: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

F = TypeVar("F", bound=Callable[..., Any])
Refusal = Callable[[str, str], PluginError]
"""(hook, what is wrong) -> the error that names the plugin too."""


def no_op(method: F) -> F:
    """Mark a default that does nothing, so that per-step calls to it are left out."""
    method.accel_no_op = True  # type: ignore[attr-defined]
    return method


class PluginHooks(NamedTuple):
    """The methods of a plugin instance, by hook name."""

    name: str
    layer: int
    methods: Mapping[str, Callable[..., Any]]


class _Hook(NamedTuple):
    """The facts of a spec that binding needs."""

    spec: Spec
    parameters: tuple[str, ...]
    answer: str
    """Outer word of the return type, which tells how answers combine."""


@cache
def _read_specs(module: ModuleType) -> Mapping[str, _Hook]:
    """Return the hooks of a contract, read once per process."""
    hooks = {}
    for name, function in vars(module).items():
        spec = getattr(function, "accel_spec", None)
        if spec is not None:
            # Annotations are text (PEP 563): "Mapping[str, str]" -> "Mapping".
            answer = str(function.__annotations__["return"]).partition("[")[0]
            hooks[name] = _Hook(spec, parameters_of(function), answer)
    return hooks


class Binder:
    """Checks plugin instances against the specs of a module and adapts their methods."""

    def __init__(self, specs: ModuleType = hookspecs) -> None:
        self._hooks = _read_specs(specs)
        self.specs: Mapping[str, Spec] = {name: hook.spec for name, hook in self._hooks.items()}

    def register(self, plugin: object, *, name: str, slot: str, origin: str = "accel-core") -> PluginHooks:
        """Check every hook of `plugin`, and adapt its methods to the specs' parameters.

        Raises:
            PluginError: a hook that does not exist, a parameter the spec does not have, an order
                mark, or a hook that the plugin's slot may not implement.
        """
        refusal: Refusal = partial(_refusal, name, slot, origin)
        methods = self._marked(plugin, slot, ASKED.get(slot, "run"), refusal)
        if slot != "tracker":  # a tracker of a user's own may call its methods as it likes
            self._refuse_unmarked(type(plugin), methods, refusal)
        return PluginHooks(name, LAYERS[slot], methods)

    def launch_class(
        self, helper: object, *, name: str, slot: str, origin: str
    ) -> Mapping[str, Callable[..., Any]]:
        """Check the hooks of a card's `launch` class, which need no mark.

        Raises:
            PluginError: as `register`; of a hook that core asks of other classes, too.
        """
        refusal: Refusal = partial(_refusal, name, slot, origin)
        methods = self._marked(helper, slot, "launch class", refusal)
        for hook, spec in self.specs.items():
            method = getattr(helper, hook, None) if spec.asked == "launch class" else None
            if method is not None and hook not in methods:
                methods[hook] = self._adapt(refusal, hook, method)
        self._refuse_unmarked(type(helper), methods, refusal)
        return methods

    def _marked(
        self, plugin: object, slot: str, asked: Asked | None, refusal: Refusal
    ) -> dict[str, Callable[..., Any]]:
        methods: dict[str, Callable[..., Any]] = {}
        marks = _marks(type(plugin), refusal)
        for attribute, value in getattr(plugin, "__dict__", {}).items():
            mark = getattr(value, "accel_core_impl", None) if type(value) is FunctionType else None
            if mark and attribute not in marks:
                about = f"{attribute} is a function of the instance, which is never called"
                raise refusal(mark.get("specname") or attribute, f"{about}; make it a method of the class")
        for attribute, mark in marks.items():
            hook = mark.get("specname") or attribute
            self._check(refusal, hook, mark, slot, asked)
            if hook in methods:
                raise refusal(hook, f"a second method implements it: {attribute}")
            methods[hook] = self._adapt(refusal, hook, getattr(plugin, attribute))
        return methods

    def hooks(self, plugins: Sequence[PluginHooks]) -> Hooks:
        """Bind the hooks to these plugins; order among equals is the order given."""
        return Hooks(self, sorted(plugins, key=lambda plugin: plugin.layer))

    def combine(self, hook: str, implementations: Sequence[Implementation]) -> Callable[..., Any]:
        """One callable, with the spec's parameters, for all these implementations."""
        facts = self._hooks[hook]
        # `accel launch` and `notebook_launcher` say more of a launcher's wrong answer.
        if facts.spec.asked == "launcher":
            return implementations[-1].call
        if facts.spec.kind == "owner":
            return of_owner(hook, implementations[-1], facts.answer)
        active = [implementation for implementation in implementations if not implementation.is_no_op]
        if facts.spec.refines is not None:
            combined = wrap(hook, active, facts.parameters.index(facts.spec.refines))
        elif len(active) == 1 and facts.answer in ("Callable", "None"):
            return active[0].call  # combining would not change its answer
        else:
            combined = ANSWERS[facts.answer](hook, active)
        return _with_parameters(hook, facts.parameters, facts.parameters, combined)

    def _check(
        self, refusal: Refusal, hook: str, mark: Mapping[str, Any], slot: str, asked: Asked | None
    ) -> None:
        if hook not in self.specs:
            raise refusal(hook, f"there is no such hook{did_you_mean(hook, self.specs)}")
        spec = self.specs[hook]
        if asked is not None and spec.asked != asked:
            raise refusal(hook, f"it would never be called: core asks {HOME[spec.asked]}; move it there")
        marks = ("tryfirst", "trylast", "wrapper", "hookwrapper")
        order = next((word for word in marks if mark.get(word)), None)
        if order:
            raise refusal(hook, f"the mark {order} is refused: layers decide the order, `self.below` goes on")
        if slot == "tracker" and not spec.observer:
            raise refusal(hook, "a tracker implements observers only")
        if slot == "extension" and spec.kind == "owner":
            remedy = "make it a strategy, or refine a value"
            raise refusal(hook, f"an extension implements no owner hook; {remedy}")

    def _adapt(self, refusal: Refusal, hook: str, method: Callable[..., Any]) -> Callable[..., Any]:
        if not callable(method):
            raise refusal(hook, f"it is {method!r}, which cannot be called; make it a method")
        wanted, answer = self._hooks[hook].parameters, self._hooks[hook].answer
        if inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method):
            raise refusal(
                hook, "an `async def` does nothing when it is called, as nobody awaits it; write `def`"
            )
        if inspect.isgeneratorfunction(method) and answer not in ("Iterable", "Iterator", "Sequence"):
            remedy = "write it without, or put @contextmanager below the mark"
            raise refusal(hook, f"a function with `yield` does nothing when it is called; {remedy}")
        if _plain_parameters(method) == wanted:  # the usual case; a signature costs 50 times as much
            return method
        parameters = inspect.signature(method).parameters.values()
        for parameter in parameters:
            is_plain = parameter.kind is parameter.POSITIONAL_OR_KEYWORD
            if not is_plain or parameter.default is not parameter.empty:
                plainly = "write it without star, slash, default or keyword-only"
                raise refusal(hook, f"parameter {parameter} is not plain: {plainly}")
            if parameter.name not in wanted:
                hint = did_you_mean(parameter.name, wanted)
                raise refusal(hook, f"the spec has no parameter {parameter.name!r}{hint}")
        taken = tuple(parameter.name for parameter in parameters)
        return method if taken == wanted else _with_parameters(hook, wanted, taken, method)

    def _refuse_unmarked(self, cls: type, methods: Mapping[str, Any], refusal: Refusal) -> None:
        """Refuse a method that was meant to be a hook, and has no mark.

        A decorator without `functools.wraps` takes the mark away, and has parameters with a star.
        """
        for name, method in inspect.getmembers(cls, _is_plain_method):
            if name in methods or name.startswith("_") or hasattr(method, "accel_core_impl"):
                continue
            named = inspect.signature(method).parameters.values()
            taken = {each.name for each in named if each.kind not in _STARRED} - {"self"}
            if name in self._hooks:
                if taken <= {*self._hooks[name].parameters}:
                    raise refusal(name, f"the method {name} is not marked; write @implements(hooks.{name})")
            elif taken:
                alike = [hook for hook, facts in self._hooks.items() if taken == {*facts.parameters}]
                for hook in difflib.get_close_matches(name, alike, 1, 0.9):
                    remedy = f"write @implements(hooks.{hook}), or rename it"
                    raise refusal(hook, f"the method {name} is never called; {remedy}")


def _is_plain_method(method: object) -> bool:
    return inspect.isfunction(method) or inspect.ismethod(method)


def _plain_parameters(method: Any) -> tuple[str, ...] | None:
    """Return the names of a method's parameters; None where only `inspect` can tell."""
    function = getattr(method, "__func__", None)
    if type(function) is not FunctionType or vars(function).keys() & {"__wrapped__", "__signature__"}:
        return None
    code, default = function.__code__, function.__defaults__
    odd = code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS) or code.co_posonlyargcount
    return None if odd or code.co_kwonlyargcount or default else code.co_varnames[1 : code.co_argcount]


def _refusal(plugin: str, slot: str, origin: str, hook: str, problem: str) -> PluginError:
    about = f"{slot} plugin {plugin!r} ({origin}), hook {hook}: {problem}"
    return PluginError(about, plugin=plugin, hook=hook, distribution=origin)


def _marks(cls: type, refusal: Refusal) -> dict[str, Mapping[str, Any]]:
    """Options of pluggy's marks by attribute, inherited ones included.

    pluggy's own walk costs ten times as much and does not see the mistake refused here.
    """
    marks: dict[str, Mapping[str, Any]] = {}
    for parent in reversed(cls.__mro__):
        for attribute, value in vars(parent).items():
            mark = getattr(value, "accel_core_impl", None)
            if mark is None:  # `staticmethod` and `classmethod` do not carry that of their function
                mark = getattr(getattr(value, "__func__", None), "accel_core_impl", None)
            if mark is None and (hidden := _hidden_mark(value)) is not None:
                hook = str(hidden.get("specname") or attribute)
                about = f"{attribute} is a {type(value).__name__}, which hides the mark of its function"
                raise refusal(hook, f"{about}; make it a method, with @implements(hooks.{hook}) on top")
            if isinstance(mark, dict):
                marks[attribute] = mark
            elif attribute in marks and value is None:
                del marks[attribute]
            elif attribute in marks:
                hook = str(marks[attribute].get("specname") or attribute)
                about = f"{parent.__name__}.{attribute} overrides it unmarked"
                raise refusal(hook, f"{about}; write @implements(hooks.{hook})")
    return marks


def _hidden_mark(value: object) -> Mapping[str, Any] | None:
    """Return the mark of a function inside a property or another object of a class."""
    if isinstance(value, (FunctionType, type, ModuleType)):
        return None
    inside = (value.fget,) if isinstance(value, property) else getattr(value, "__dict__", {}).values()
    marks = (getattr(each, "accel_core_impl", None) for each in inside if isinstance(each, FunctionType))
    return next((mark for mark in marks if isinstance(mark, dict)), None)


def _with_parameters(
    hook: str, wanted: Sequence[str], taken: Sequence[str], call: Callable[..., Any]
) -> Callable[..., Any]:
    """Make an adapter with all parameters of the spec for `call`, which takes some.

    The adapter is generated, because it stands in every step: a closure with *args costs four times
    as much.
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
    """The hooks of a stack, each an attribute to call; resolved on first use.

    There are three ways to call a hook:

    * `hooks.NAME(...)` gives the answer of all plugins together, by the kind of the hook. It is the
      usual way. A plugin's `self.below.NAME(...)` is the same, for the layers below the plugin.
    * `hooks.step("NAME")` gives the callable, or None where no plugin does anything; callers then
      leave the call out. `unit.steps.NAME` is that, bound once per unit for hooks of each step.
    * `hooks.implementations("NAME")` gives each plugin's method apart, where the caller has to know
      which plugin answers.
    """

    def __init__(self, binder: Binder, plugins: Sequence[PluginHooks]) -> None:
        self._binder = binder
        self._plugins = tuple(plugins)

    def implementations(self, hook: str) -> list[Implementation]:
        """Return the implementations of the hook, bottom layer first."""
        return [
            Implementation(plugin.name, plugin.layer, plugin.methods[hook])
            for plugin in self._plugins
            if hook in plugin.methods
        ]

    def below_layer(self, layer: int) -> Hooks:
        """Return the same hooks, answered by the layers below `layer`."""
        return Hooks(self._binder, [plugin for plugin in self._plugins if plugin.layer < layer])

    def step(self, hook: str) -> Callable[..., Any] | None:
        """Return the callable of a hook; None if all implementations are `no_op`."""
        implementations = self.implementations(hook)
        if self._binder.specs[hook].kind == "owner":
            implementations = implementations[-1:]
        return (
            None
            if all(implementation.is_no_op for implementation in implementations)
            else getattr(self, hook)
        )

    def __getattr__(self, hook: str) -> Any:
        if hook.startswith("_"):
            raise AttributeError(hook)
        specs = self._binder.specs
        if hook not in specs:
            raise AttributeError(f"there is no hook {hook!r}{did_you_mean(hook, specs)}")
        implementations = self.implementations(hook)
        if not implementations and specs[hook].kind == "owner":
            stack = " + ".join(plugin.name for plugin in self._plugins) or "an empty stack"
            raise PluginError(
                f"hook {hook}: no plugin of {stack} implements it\nadd one that does to the stack", hook=hook
            )
        resolved = self._binder.combine(hook, implementations)
        setattr(self, hook, resolved)
        return resolved


class Steps:
    """The bound per-step hooks of a unit: an attribute per hook, None for no-ops."""

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

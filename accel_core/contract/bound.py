"""The hooks of a stack, resolved from pluggy's implementations to plain callables.

Nothing is called through pluggy: its first-result call would run `backward` twice when a hook returns
None, and its `tryfirst` beats our layers (docs/decisions).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, partial
from operator import itemgetter
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

from accel_core.contract.arguments import did_you_mean
from accel_core.errors import PluginError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import pluggy

    from accel_core.contract.spec import Combine, Spec

F = TypeVar("F", bound=Callable[..., Any])


def no_op(method: F) -> F:
    """Mark a default that adds nothing to torch's own call, so that callers make that call themselves."""
    method.accel_no_op = True  # type: ignore[attr-defined]
    return method


class Implementation(NamedTuple):
    """One plugin's method for one hook, with the spec's parameters."""

    plugin: str
    call: Callable[..., Any]


class Hooks:
    """The hooks of a stack, each an attribute to call; resolved on first use.

    There are three ways to call a hook:

    * `hooks.NAME(...)` returns the combined result of all plugins, by the kind of the hook. This is the
      usual way; `hooks["PACKAGE.NAME"](...)` calls a hook that a package declares. In a plugin,
      `self.below.NAME(...)` calls an owner hook of the layers below the plugin. For other kinds of hooks
      `self.below` returns nothing, or the value unchanged: core calls the layers below anyway.
    * `hooks.step("NAME")` returns the callable, or None if no plugin does anything; callers then leave the
      call out. `unit.steps.NAME` is this callable, bound once per unit for per-step hooks.
    * `hooks.implementations("NAME")` returns each plugin's method separately, for callers that must know
      which plugin answers.
    """

    def __init__(self, callers: pluggy.HookRelay, layers: Mapping[str, int], *, below: bool = False) -> None:
        """Take the implementations of some plugins.

        Args:
            callers: pluggy's hooks by name.
            layers: plugin -> layer. Plugins of the same layer keep this order.
            below: True for a plugin's `below`, which has owner hooks only: core calls the other hooks of
                every plugin itself.
        """
        self._below = below
        self._callers: Mapping[str, pluggy.HookCaller] = vars(callers)
        self._layers = dict(sorted(layers.items(), key=itemgetter(1)))

    def implementations(self, hook: str) -> list[Implementation]:
        """Return the implementations of the hook, bottom layer first; empty for undeclared hooks."""
        caller, found = self._callers.get(hook), []
        if caller is None or caller.spec is None:
            return []
        if self._below and caller.spec.function.accel_spec.kind != "owner":  # type: ignore[attr-defined]
            return []
        wanted, marked = caller.spec.argnames, caller.get_hookimpls()
        for plugin in self._layers if marked else ():
            for each in marked:
                if each.plugin_name == plugin:
                    call: Callable[..., Any] = each.function
                    if each.argnames != wanted:
                        call = _with_parameters(hook, wanted, each.argnames, call)
                    found.append(Implementation(plugin, call))
        return found

    def below_layer(self, layer: int) -> Hooks:
        """Return the same hooks, answered by the layers below `layer`."""
        below = {plugin: each for plugin, each in self._layers.items() if each < layer}
        made = Hooks.__new__(Hooks)
        made._callers, made._layers, made._below = self._callers, below, True
        return made

    def step(self, hook: str) -> Callable[..., Any] | None:
        """Return the callable of a hook; None if all implementations are `no_op`."""
        called: Callable[..., Any] = getattr(self, hook)
        return None if getattr(called, "accel_no_op", False) else called

    def __getitem__(self, hook: str) -> Callable[..., Any]:
        called: Callable[..., Any] = getattr(self, hook)
        return called

    def __getattr__(self, hook: str) -> Any:
        if hook.startswith("_"):
            raise AttributeError(hook)
        caller = self._callers.get(hook)
        if caller is None or caller.spec is None:
            raise AttributeError(f"there is no hook {hook!r}{did_you_mean(hook, self._callers)}")
        spec: Spec = caller.spec.function.accel_spec  # type: ignore[attr-defined]
        active = found = self.implementations(hook)
        called: Any
        if spec.kind == "owner":
            called = found[-1].call if found else partial(_refuse, hook, tuple(self._layers))
        else:
            active = []
            for each in found:
                if not getattr(each.call, "accel_no_op", False):
                    active.append(each)
            if spec.kind == "wrapper":
                called = _wrapped(active, spec.refines)
            elif spec.combine is not None:
                called = _answers(hook, active, spec.combine)
            else:
                called = active[0].call if len(active) == 1 else _calls(active)
        if not active:
            called.accel_no_op = True
        vars(self)[hook] = called
        return called


def _refuse(hook: str, plugins: Sequence[str], *_: object, **__: object) -> NoReturn:
    stack = " + ".join(plugins) or "an empty stack"
    raise PluginError(
        f"hook {hook}: no plugin of {stack} implements it\nadd one that does to the stack", hook=hook
    )


def _wrapped(methods: Sequence[Implementation], position: int) -> Callable[..., Any]:
    def refine(*arguments: Any) -> Any:
        values = list(arguments)
        for _, call in methods:
            values[position] = call(*values)
        return values[position]

    return refine


def _calls(methods: Sequence[Implementation]) -> Callable[..., None]:
    def call_each(*arguments: Any) -> None:
        for _, call in methods:
            call(*arguments)

    return call_each


def _answers(hook: str, methods: Sequence[Implementation], combine: Combine) -> Callable[..., Any]:
    def call_and_combine(*arguments: Any) -> Any:
        answers = []
        for plugin, call in methods:
            if (answer := call(*arguments)) is not None:
                answers.append((plugin, answer))
        return combine(hook, answers)

    return call_and_combine


def _with_parameters(
    hook: str, wanted: Sequence[str], taken: Sequence[str], call: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a function with all parameters of the spec, which calls `call` with the parameters it takes.

    The function is generated because it runs in every step: a closure with *args takes four times as long.
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


class Steps:
    """The bound per-step hooks of a unit: an attribute per hook, None for no-ops."""

    def __init__(self, hooks: Hooks) -> None:
        for hook, caller in hooks._callers.items():
            if caller.spec is not None and caller.spec.function.accel_spec.per_step:  # type: ignore[attr-defined]
                setattr(self, hook, hooks.step(hook))

    if TYPE_CHECKING:  # one attribute per hook spec

        def __getattr__(self, hook: str) -> Any: ...


# -- how the answers of several plugins become one -----------------------------------------------


def merge(hook: str, answers: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Merge mappings; raise PluginError if two plugins return the same key."""
    merged: dict[str, Any] = {}
    owners: dict[str, str] = {}
    for plugin, answer in answers:
        for key in merged.keys() & answer.keys():
            raise PluginError(
                f"hook {hook}: {owners[key]} and {plugin} both answer {key}\n"
                f"only one of them can be right: leave {owners[key]} or {plugin} out of the stack",
                plugin=plugin,
                hook=hook,
            )
        merged |= answer
        owners |= dict.fromkeys(answer, plugin)
    return merged


def concatenate(hook: str, answers: Sequence[tuple[str, Iterable[Any]]]) -> list[Any]:
    """Concatenate sequences."""
    return [item for _, answer in answers for item in answer]


def enter(
    hook: str, answers: Sequence[tuple[str, AbstractContextManager[Any]]]
) -> AbstractContextManager[Any]:
    """Return a context that enters the contexts of all plugins, bottom layer first."""
    return answers[0][1] if len(answers) == 1 else _entered([context for _, context in answers])


def compose(
    hook: str, answers: Sequence[tuple[str, Callable[[], AbstractContextManager[Any]]]]
) -> Callable[[], AbstractContextManager[Any]] | None:
    """Return a factory of the contexts of all factories; None if there is no factory."""
    factories = [factory for _, factory in answers]
    if len(factories) < 2:
        return factories[0] if factories else None
    return lambda: _entered(factory() for factory in factories)


@contextmanager
def _entered(contexts: Iterable[AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield

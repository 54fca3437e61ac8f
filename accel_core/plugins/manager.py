"""The plugins of a run, registered with pluggy, which validates their hooks."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from functools import cache
from math import inf
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final, NoReturn

import pluggy

from accel_core.contract import hooks as hookspecs
from accel_core.contract.arguments import did_you_mean
from accel_core.contract.bound import Hooks
from accel_core.contract.spec import PROJECT
from accel_core.errors import PluginError

logger = logging.getLogger(__name__)

LAYERS: Final[Mapping[str, int]] = {
    "base": 0,
    "device": 1,
    "precision": 2,
    "strategy": 3,
    "launcher": 3,
    "extension": 4,
    "tracker": 5,
}

_MARK: Final = f"{PROJECT}_impl"
_DELEGATES: Final = "accel_implements"
"""Mark of all implementations, including methods that only delegate, which have no mark for pluggy."""


class PluginManager(pluggy.PluginManager):
    """The specs of the contract and of packages, and the plugins of a run by name."""

    def __init__(self, specs: ModuleType = hookspecs) -> None:
        super().__init__(PROJECT)
        self.layers: dict[str, int] = {}
        for name, spec in _parsed(specs).items():
            caller = pluggy.HookCaller(name, _refuse_call)
            caller.spec = spec
            setattr(self.hook, name, caller)

    def add_package_specs(self, package: str, module: ModuleType) -> None:
        """Add the hooks that a module of a package declares, each as `PACKAGE.NAME`.

        Raises:
            PluginError: the module declares no hook.
        """
        prefixed = ModuleType(package)
        declared = [each for each in vars(module).values() if hasattr(each, "accel_spec")]
        if not declared:
            raise PluginError(
                f"plugin {package!r}: module {module.__name__}, the card's hookspecs, declares no hook\n"
                "mark its functions by @spec(KIND) of accel_core.contract.spec",
                plugin=package,
            )
        vars(prefixed).update({f"{package}.{each.__name__}": each for each in declared})
        self.add_hookspecs(prefixed)

    def add_plugin(self, plugin: object, *, name: str, slot: str, origin: str = "accel-core") -> None:
        """Register a plugin, and validate its hooks.

        Raises:
            PluginError: a hook or parameter is unknown, another plugin of the run has this name, or plugins
                of this slot may not implement a hook.
        """
        _inherit_marks(type(plugin))  # type: ignore[arg-type]
        try:
            self.register(plugin, name)
            self.check_pending()
        except (pluggy.PluginValidationError, ValueError) as error:
            raise _refusal(name, slot, origin, str(error)) from error
        self.layers[name] = LAYERS[slot]
        callers = self.get_hookcallers(plugin) or ()
        marked = {caller.name for caller in callers}
        for hook in vars(self.hook):
            method = getattr(type(plugin), hook, None)
            if isinstance(method, FunctionType) and not hasattr(method, _DELEGATES) and hook not in marked:
                logger.warning(
                    "%s plugin %r (%s): method %s has the name of a hook, but no mark, and nothing calls it;"
                    " write @implements(hooks.%s) above it, or give it another name",
                    *(slot, name, origin, hook, hook),
                )
        for caller in callers if slot in ("tracker", "extension") else ():
            spec: Any = caller.spec and caller.spec.function.accel_spec  # type: ignore[attr-defined]
            if spec and (not spec.observer if slot == "tracker" else spec.kind == "owner"):
                rule = "a tracker implements observers only, and an extension no owner hook"
                raise _refusal(name, slot, origin, f"hook {caller.name}: {rule}")

    def check_package_hooks(self, origins: Mapping[str, str]) -> None:
        """Refuse implementations of hooks `PACKAGE.NAME` that the package does not declare.

        Args:
            origins: name of a card of the run -> its distribution and version. Hooks of packages that are
                not in the run are ignored.

        Raises:
            PluginError: names the most similar hook.
        """
        hooks: Mapping[str, pluggy.HookCaller] = vars(self.hook)
        for name in [name for name, caller in hooks.items() if caller.spec is None]:
            package = name.partition(".")[0]
            for method in hooks[name].get_hookimpls() if package in origins else ():
                known = [each for each in hooks if each.startswith(f"{package}.") and hooks[each].spec]
                raise PluginError(
                    f"plugin {method.plugin_name!r} implements {name!r}, a hook that {package}"
                    f" ({origins[package]}) does not have{did_you_mean(name, known)}\n"
                    f"its hooks are: {', '.join(known) or 'none'}",
                    plugin=method.plugin_name,
                    hook=name,
                )

    def hooks_of(self, plugins: Collection[str], below: float = inf) -> Hooks:
        """Return the hooks of these plugins whose layer is below `below`.

        Plugins of one layer keep the order of registration.
        """
        layers = {}
        for name, layer in self.layers.items():
            if name in plugins and layer < below:
                layers[name] = layer  # noqa: PERF403  a comprehension is a call, and each start makes several
        return Hooks(self.hook, layers, below=below < inf)


def _refuse_call(hook: str, *_: object) -> NoReturn:
    raise AssertionError(f"{hook}: nothing is called through pluggy, see accel_core.contract.bound")


def _refusal(plugin: str, slot: str, origin: str, problem: str) -> PluginError:
    about = f"{slot} plugin {plugin!r} ({origin}): {problem}"
    return PluginError(
        f"{about}\ndocs/hooks.md has each hook and its parameters", plugin=plugin, distribution=origin
    )


@cache
def _parsed(module: ModuleType) -> Mapping[str, Any]:
    """Return the specs of a module by name, parsed once per process."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(module)
    return {name: caller.spec for name, caller in vars(manager.hook).items()}


@cache
def _inherit_marks(cls: type) -> None:
    """Mark each override of a marked method, which implements the same hook.

    A method that only delegates is not marked for pluggy, as if the class did not define it.
    """
    marks: dict[str, Any] = {}
    for parent in reversed(cls.__mro__):
        for name, value in vars(parent).items():
            mark = getattr(value, _DELEGATES, getattr(value, _MARK, marks.get(name)))
            if isinstance(mark, dict) and callable(value):
                delegates = _only_delegates(mark["specname"], value)
                setattr(value, _MARK, None if delegates else mark)
                setattr(value, _DELEGATES, mark)
                marks[name] = mark


def _only_delegates(hook: str, method: Any) -> bool:
    """Return True if the method is only `return self.below.HOOK(...)`, with its own parameters."""
    code = getattr(method, "__code__", None)
    if code is None or code.co_names != ("below", hook):
        return False
    own, *others = code.co_varnames[: code.co_argcount]
    call = f"{own}.below.{hook}({', '.join(others)})"
    sources = [f"def method({', '.join([own, *others])}): {before}{call}" for before in ("return ", "")]
    return _instructions(code) in [_instructions(compile(each, "", "exec").co_consts[0]) for each in sources]


def _instructions(code: CodeType) -> list[tuple[str, Any]]:
    """Return the instructions of a function; a docstring makes no difference."""
    import dis  # late: few plugins delegate

    return [(each.opname, each.argval) for each in dis.get_instructions(code)]

"""Marks of the contract: `spec` declares a hook, `implements` marks a plugin's method for a hook."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import (
    Any,
    Concatenate,
    Final,
    Literal,
    NamedTuple,
    ParamSpec,
    TypeVar,
    get_args,
    overload,
)

import pluggy

from accel_core.contract.arguments import did_you_mean
from accel_core.errors import PluginError

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

PROJECT: Final = "accel_core"
"""The name under which pluggy stores the marks."""

Kind = Literal["owner", "everyone", "wrapper"]

Combine = Callable[[str, Sequence[tuple[str, Any]]], Any]
"""(hook, (plugin, answer) of each plugin whose answer is not None, bottom layer first) -> combined answer."""

_spec_marker = pluggy.HookspecMarker(PROJECT)
_impl_marker = pluggy.HookimplMarker(PROJECT)


class Spec(NamedTuple):
    """Properties of a hook; its function has them as `accel_spec`."""

    kind: Kind
    per_step: bool
    combine: Combine | None = None
    """Function that combines the answers of a hook of kind everyone; None if the hook has no answers."""
    refines: int = 0
    """Position of the parameter that each plugin of a wrapper hook takes and returns."""
    observer: bool = False
    """True if trackers may implement the hook too."""


def spec(
    kind: Kind | Literal["observer"], combine: Combine | None = None, *, per_step: bool = False
) -> Callable[[F], F]:
    """Declare a hook.

    Args:
        kind: owner: exactly one plugin answers. everyone: all plugins that implement the hook, bottom layer
            first. observer: like everyone, trackers included. wrapper: all plugins that implement the hook
            refine its first parameter after `unit`, bottom layer innermost, and return it.
        combine: for everyone and observer: how answers become one (`merge`, `concatenate`, `enter`,
            `compose`, or a function like these). Without it the hook has no answer.
        per_step: called in each step; bound once per unit.

    Raises:
        PluginError: the kind is unknown, or `combine` is not a function or does not fit the kind.
    """

    def declare(function: F) -> F:
        _check_spec(function.__name__, kind, combine)
        function.accel_spec = Spec(  # type: ignore[attr-defined]
            kind="everyone" if kind == "observer" else kind,
            per_step=per_step,
            combine=combine,
            refines=int(function.__code__.co_varnames[:1] == ("unit",)),
            observer=kind == "observer",
        )
        return _spec_marker(function)

    return declare


def _check_spec(hook: str, kind: object, combine: object) -> None:
    """Refuse a declaration that would fail at the hook's first call."""
    if kind not in (known := (*get_args(Kind), "observer")):
        problem = f"{kind!r} is not a kind of hook{did_you_mean(kind, known)}"
        remedy = f"kinds are {', '.join(known)}"
    elif combine is not None and not callable(combine):
        problem = f"combine must be a function, got {combine!r}"
        remedy = "import merge, concatenate, enter or compose from accel_core.contract.bound, and give it"
    elif combine is not None and kind in ("owner", "wrapper"):
        problem = f"combine is for hooks of everyone and observers, and this is of kind {kind!r}"
        remedy = "leave combine out: one plugin answers, or each refines the answer"
    else:
        return
    raise PluginError(f"spec of hook {hook}: {problem}\n{remedy}", hook=hook)


Method = Callable[Concatenate[Any, P], R]


@overload
def implements(spec: str) -> Callable[[F], F]: ...
@overload
def implements(spec: Callable[P, R]) -> Callable[[Method[P, R]], Method[P, R]]: ...
def implements(spec: Any) -> Any:
    """Mark a method as the implementation of `spec`: `@implements(hooks.wrap_model)`.

    A type checker then compares name, parameters and types with the spec. At run time an implementation may
    have fewer parameters than the spec. An override in a subclass needs no mark.

    A hook of another package is implemented by name, `@implements("monitor.device_health")`. If that package
    is not in the run, the method is never called; if it is, it must have a hook of this name.

    Raises:
        PluginError: `spec` is not a hook, such as the method itself under a bare `@implements`, or a name
            without a package.
    """
    if isinstance(spec, str) and "." in spec:
        return _impl_marker(specname=spec, optionalhook=True)
    if not hasattr(spec, "accel_spec"):
        name = getattr(spec, "__qualname__", repr(spec))
        raise PluginError(
            f"implements: {name} is not a hook\n"
            'write @implements(hooks.NAME) above the method, without quotes, or @implements("PACKAGE.NAME")'
        )
    return _impl_marker(specname=spec.__name__)

"""Marks of the contract.

`spec` declares a hook, `implements` marks a plugin's method for one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec, TypeVar

import pluggy

from accel_core.errors import PluginError

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

Kind = Literal["owner", "everyone", "wrapper"]

Asked = Literal["run", "launch class", "launcher", "store"]
"""Plugins that core asks for a hook.

Those of a run, the card's `launch` class, launchers, or stores.
"""

_spec_marker = pluggy.HookspecMarker("accel_core")
_impl_marker = pluggy.HookimplMarker("accel_core")


class Spec(NamedTuple):
    """Properties of a hook; found on its function as `accel_spec`."""

    kind: Kind
    per_step: bool
    refines: str | None = None
    """Of a wrapper: the parameter that each plugin takes and gives back."""
    observer: bool = False
    """True if trackers may implement it too."""
    asked: Asked = "run"


def spec(
    kind: Kind | Literal["observer"], *, per_step: bool = False, asked: Asked = "run"
) -> Callable[[F], F]:
    """Declare a hook.

    Args:
        kind: owner: exactly one plugin does it. everyone: all plugins that implement it, bottom layer
            first. observer: like everyone, trackers included. wrapper: all plugins that implement it
            refine its first parameter after `unit`, bottom layer innermost, and return it.
        per_step: called in each step; bound once per unit.
        asked: what core asks; the method of any other class would never be called.
    """

    def declare(function: F) -> F:
        names = [name for name in parameters_of(function) if name != "unit"]
        function.accel_spec = Spec(  # type: ignore[attr-defined]
            kind="everyone" if kind == "observer" else kind,
            per_step=per_step,
            refines=names[0] if kind == "wrapper" else None,
            observer=kind == "observer",
            asked=asked,
        )
        return _spec_marker(function)

    return declare


def parameters_of(spec: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of a spec's parameters, which are all plain.

    A signature of `inspect` would cost each start of a run some milliseconds.
    """
    code = spec.__code__
    return code.co_varnames[: code.co_argcount]


def implements(
    spec: Callable[P, R],
) -> Callable[[Callable[Concatenate[Any, P], R]], Callable[Concatenate[Any, P], R]]:
    """Mark a method as the implementation of `spec`: `@implements(hooks.wrap_model)`.

    A type checker then compares name, parameters and types with the spec. At run time an
    implementation may have fewer parameters than the spec.

    Raises:
        PluginError: `spec` is not a hook, such as the method itself under a bare `@implements`.
    """
    if not hasattr(spec, "accel_spec"):
        name = getattr(spec, "__qualname__", repr(spec))
        raise PluginError(f"implements: {name} is not a hook\nwrite @implements(hooks.NAME) above the method")

    def mark(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
        return _impl_marker(specname=spec.__name__)(method)

    return mark

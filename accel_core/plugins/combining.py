"""How the answers of several plugins to one hook become one."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Final

from attrs import frozen

from accel_core.errors import PluginError

__all__ = ["ANSWERS", "Implementation", "wrap"]


@frozen
class Implementation:
    """One plugin's method for one hook, with the spec's parameters."""

    plugin: str
    layer: int
    call: Callable[..., Any]

    @property
    def idle(self) -> bool:
        """Whether it is marked as doing nothing."""
        return getattr(self.call, "accel_no_op", False)


def wrap(hook: str, found: Sequence[Implementation], position: int) -> Callable[..., Any]:
    """A wrapper hook: the argument at `position` goes through them all, the first innermost."""

    def refine(*arguments: Any) -> Any:
        values = list(arguments)
        for each in found:
            values[position] = each.call(*values)
            if values[position] is None:
                raise PluginError(
                    f"hook {hook}: {each.plugin} gave None\nreturn what it was given, changed or not",
                    plugin=each.plugin,
                    hook=hook,
                )
        return values[position]

    return refine


def _merge(hook: str, found: Sequence[Implementation]) -> Callable[..., Mapping[str, Any]]:
    def call(*arguments: Any) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        source: dict[str, str] = {}
        for implementation in found:
            answer = implementation.call(*arguments) or {}
            if not isinstance(answer, Mapping):
                raise _misfit(hook, implementation, answer, "a mapping")
            for key, value in answer.items():
                if key in merged and not _same(merged[key], value):
                    raise _disagreement(
                        hook, f"{key} = ", source[key], merged[key], implementation.plugin, value
                    )
                merged[key] = value
                source[key] = implementation.plugin
        return merged

    return call


def _concatenate(hook: str, found: Sequence[Implementation]) -> Callable[..., list[Any]]:
    def call(*arguments: Any) -> list[Any]:
        items: list[Any] = []
        for each in found:
            answer = each.call(*arguments) or ()
            if isinstance(answer, str) or not isinstance(answer, Iterable):
                raise _misfit(hook, each, answer, "a sequence")
            items += answer
        return items

    return call


def _misfit(hook: str, implementation: Implementation, answer: object, wanted: str) -> PluginError:
    plugin = implementation.plugin
    return PluginError(
        f"hook {hook}: {plugin} gave a {type(answer).__name__}, not {wanted}\nreturn {wanted}, or None",
        plugin=plugin,
        hook=hook,
    )


@contextmanager
def _entered(contexts: Iterable[AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _enter(hook: str, found: Sequence[Implementation]) -> Callable[..., AbstractContextManager[Any]]:
    def call(*arguments: Any) -> AbstractContextManager[Any]:
        contexts = [context for each in found if (context := each.call(*arguments)) is not None]
        return contexts[0] if len(contexts) == 1 else _entered(contexts)

    return call


def _compose(hook: str, found: Sequence[Implementation]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Callable[[], AbstractContextManager[Any]] | None:
        factories = [factory for each in found if (factory := each.call(*arguments)) is not None]
        if len(factories) < 2:
            return factories[0] if factories else None
        return lambda: _entered(factory() for factory in factories)

    return call


def _agree(hook: str, found: Sequence[Implementation]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        answers = [(each.plugin, answer) for each in found if (answer := each.call(*arguments)) is not None]
        for plugin, answer in answers[1:]:
            if not _same(answers[0][1], answer):
                raise _disagreement(hook, "", *answers[0], plugin, answer)
        return answers[0][1] if answers else None

    return call


def _same(left: Any, right: Any) -> bool:
    try:
        return bool(left == right)
    except (RuntimeError, ValueError):  # arrays compare element by element: not one answer
        return False


def _disagreement(hook: str, what: str, one: str, first: Any, other: str, second: Any) -> PluginError:
    answers = f"{one} answers {what}{reprlib.repr(first)}, {other} answers {what}{reprlib.repr(second)}"
    return PluginError(
        f"hook {hook}: {answers}\nonly one of them can be right: leave {one} or {other} out of the stack",
        plugin=other,
        hook=hook,
    )


ANSWERS: Final[Mapping[str, Callable[[str, Sequence[Implementation]], Callable[..., Any]]]] = {
    "Mapping": _merge,
    "Sequence": _concatenate,
    "AbstractContextManager": _enter,
    "Callable": _compose,
    "None": _agree,
}
"""Outer word of a spec's return type -> what makes one callable of its implementations."""

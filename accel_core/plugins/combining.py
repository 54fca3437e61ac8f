"""Combining the answers of several plugins to one hook."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Final, NamedTuple, get_args

from accel_core.contract.hooks import PreparedKind
from accel_core.errors import PluginError


class Implementation(NamedTuple):
    """One plugin's method for one hook, with the spec's parameters."""

    plugin: str
    layer: int
    call: Callable[..., Any]

    @property
    def is_no_op(self) -> bool:
        """Tell if the method is marked as doing nothing."""
        return getattr(self.call, "accel_no_op", False)


def wrap(hook: str, methods: Sequence[Implementation], position: int) -> Callable[..., Any]:
    """Make a wrapper hook: all refine the argument at `position`, first innermost."""

    def refine(*arguments: Any) -> Any:
        values = list(arguments)
        for implementation in methods:
            values[position] = implementation.call(*values)
            if values[position] is None:
                about = f"hook {hook}: {implementation.plugin} gave None"
                remedy = "return what it was given, changed or not"
                raise PluginError(f"{about}\n{remedy}", plugin=implementation.plugin, hook=hook)
        return values[position]

    return refine


def of_owner(hook: str, owner: Implementation, answer: str) -> Callable[..., Any]:
    """Return the owner's method, which raises for another kind of answer.

    answer: outer word of the spec's return type. Core's own answers, and words that other classes may stand
    for, are not looked at.
    """
    if owner.layer == 0 or answer not in OWNED:
        return owner.call
    kind, words = OWNED[answer]

    def call(*arguments: Any) -> Any:
        given = owner.call(*arguments)
        if not _is_a(given, kind):
            about = f"hook {hook}: {owner.plugin} gave {reprlib.repr(given)}, not {words}"
            raise PluginError(f"{about}\nreturn {words}", plugin=owner.plugin, hook=hook)
        return given

    call.__wrapped__ = owner.call  # type: ignore[attr-defined]
    return call


def _is_a(given: object, kind: type | str | tuple[str, ...]) -> bool:
    """Tell if it is of this class, or None or one of these words.

    The class is named where core must not import it.
    """
    if isinstance(kind, tuple):
        return given is None or given in kind
    if isinstance(given, str):
        return False
    if kind is object:
        return given is not None
    if isinstance(kind, str):
        return any(each.__name__ == kind for each in type(given).__mro__)
    return isinstance(given, kind)


OWNED: Final[Mapping[str, tuple[type | str | tuple[str, ...], str]]] = {
    "AbstractContextManager": (AbstractContextManager, "a context manager"),
    "Collectives": (object, "Collectives"),
    "Iterable": (object, "the loader, wrapped or not"),
    "Iterator": (Iterable, "an iterator"),
    "LRScheduler": (object, "a scheduler"),
    "PreparedKind | None": (get_args(PreparedKind), f"{', '.join(get_args(PreparedKind))} or None"),
    "Mapping": (Mapping, "a mapping"),
    "Optimizer": (object, "an optimizer"),
    "OptimizerState": ("OptimizerState", "an OptimizerState"),
    "Sequence": (Iterable, "a sequence"),
    "Tensor": ("Tensor", "a tensor"),
    "Topology": ("Topology", "a Topology"),
    "bool": (bool, "True or False"),
    "frozenset": (AbstractSet, "a set of words"),
    "nn.Module": ("Module", "a module"),
    "torch.device": ("device", "a torch.device"),
}
"""Outer word of an owner's return type -> what it stands for, and words for it.

A class, its name, or all answers. `object`: anything but None.
"""


def _merge(hook: str, methods: Sequence[Implementation]) -> Callable[..., Mapping[str, Any]]:
    def call(*arguments: Any) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        source: dict[str, str] = {}
        for plugin, answer in typed_answers(hook, methods, arguments, Mapping, "a mapping"):
            for key, value in answer.items():
                if key in merged and not _same(merged[key], value):
                    raise _disagreement(hook, f"{key} = ", source[key], merged[key], plugin, value)
                merged[key], source[key] = value, plugin
        return merged

    return call


def _concatenate(hook: str, methods: Sequence[Implementation]) -> Callable[..., list[Any]]:
    def call(*arguments: Any) -> list[Any]:
        answers = typed_answers(hook, methods, arguments, Iterable, "a sequence")
        return [item for _, answer in answers for item in answer]

    return call


def typed_answers(
    hook: str, methods: Sequence[Implementation], arguments: Sequence[Any], kind: type, words: str
) -> Iterator[tuple[str, Any]]:
    """(plugin, answer) of each plugin that answers; PluginError for a wrong type."""
    for implementation in methods:
        answer, plugin = implementation.call(*arguments), implementation.plugin
        if not answer:
            continue
        if isinstance(answer, str) or not isinstance(answer, kind):
            about = f"hook {hook}: {plugin} gave a {type(answer).__name__}, not {words}"
            raise PluginError(f"{about}\nreturn {words}, or None", plugin=plugin, hook=hook)
        yield plugin, answer


@contextmanager
def _entered(contexts: Iterable[AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _enter(hook: str, methods: Sequence[Implementation]) -> Callable[..., AbstractContextManager[Any]]:
    def call(*arguments: Any) -> AbstractContextManager[Any]:
        contexts = [context for each in methods if (context := each.call(*arguments)) is not None]
        return contexts[0] if len(contexts) == 1 else _entered(contexts)

    return call


def _compose(hook: str, methods: Sequence[Implementation]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Callable[[], AbstractContextManager[Any]] | None:
        factories = [factory for each in methods if (factory := each.call(*arguments)) is not None]
        if len(factories) < 2:
            return factories[0] if factories else None
        return lambda: _entered(factory() for factory in factories)

    return call


def _agree(hook: str, methods: Sequence[Implementation]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        answers = [(each.plugin, answer) for each in methods if (answer := each.call(*arguments)) is not None]
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


def _disagreement(hook: str, key: str, one: str, first: Any, other: str, second: Any) -> PluginError:
    answers = f"{one} answers {key}{reprlib.repr(first)}, {other} answers {key}{reprlib.repr(second)}"
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
"""Outer word of a spec's return type -> the function that combines the answers."""

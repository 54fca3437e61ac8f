"""Each hook of the contract is declared as the contract says."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from checkout import refuse

from accel_core.contract import hooks as hookspecs
from accel_core.contract.bound import Hooks

SPECS = {name: value for name, value in vars(hookspecs).items() if hasattr(value, "accel_spec")}


def names(hook: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(hook).parameters)


def those_that(break_it: Callable[[Any], bool]) -> Iterator[str]:
    """Where each hook is declared that breaks a rule."""
    for name, hook in SPECS.items():
        if break_it(hook):
            file = Path(hook.__code__.co_filename)
            yield f"accel_core/contract/hooks/{file.name}:{hook.__code__.co_firstlineno}: {name}"


def test_there_are_hooks() -> None:
    assert len(SPECS) > 30


def test_a_hook_has_a_docstring() -> None:
    refuse(
        those_that(lambda hook: not inspect.getdoc(hook)), "say when and on which ranks core calls the hook"
    )


def test_the_parameters_of_a_hook_are_plain() -> None:
    def is_special(parameter: inspect.Parameter) -> bool:
        return (
            parameter.kind is not parameter.POSITIONAL_OR_KEYWORD or parameter.default is not parameter.empty
        )

    refuse(
        those_that(lambda hook: any(map(is_special, inspect.signature(hook).parameters.values()))),
        "a parameter with a default, or by position or keyword only: a plugin's may leave parameters out",
    )


def test_a_hook_is_fully_typed() -> None:
    refuse(
        those_that(lambda hook: [*hook.__annotations__] != [*names(hook), "return"]),
        "annotate each parameter and the result",
    )


def test_the_answers_of_a_hook_combine_as_its_kind_says() -> None:
    def is_vague(hook: Any) -> bool:
        spec = hook.accel_spec
        has_answer = hook.__annotations__["return"] != "None"
        return spec.kind == "everyone" and has_answer != (spec.combine is not None)

    refuse(those_that(is_vague), "say how the answers of everyone become one: @spec(kind, combine)")


def test_no_hook_is_called_as_a_method_of_hooks() -> None:
    refuse(those_that(lambda hook: hasattr(Hooks, hook.__name__)), "rename the hook, or the method of Hooks")


def test_a_hook_of_a_step_is_given_its_unit_first() -> None:
    refuse(
        those_that(
            lambda hook: (
                hook.accel_spec.per_step and hook.__name__ != "mark_step" and names(hook)[0] != "unit"
            )
        ),
        "the first parameter of a hook that is called in a step is `unit`",
    )

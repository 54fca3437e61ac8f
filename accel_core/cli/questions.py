"""Questions of `accel config init`, and the file made from the answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import click
from attrs import frozen

from accel_core.cli.terminal import say
from accel_core.config.convert import convert_option, members, plain
from accel_core.config.sections import CORE, Sections
from accel_core.config.sources import RawText
from accel_core.contract.card import Slot
from accel_core.contract.config import RunConfig
from accel_core.contract.options import Option, options_of
from accel_core.plugins.catalog import not_installed, unknown_device
from accel_core.plugins.discovery import Discovery

MEETING: Final = "launch.rendezvous"
"""Option that is asked for if there are several nodes."""


@frozen
class Answer:
    """An option, its help, and the answered value."""

    path: str
    help: str
    value: Any
    default: Any


def ask(paths: Sequence[str], discovery: Discovery, *, silent: bool = False) -> list[Answer]:
    """Ask for each option on the terminal, then for those of the named strategy.

    silent: ask nothing, answer with the defaults.
    """
    answers: list[Answer] = []
    for path in paths:
        if path != MEETING or next(it.value for it in answers if it.path == "launch.nodes") > 1:
            answers.append(_answer(path, _core_option(path), discovery, silent))
    strategy = next((answer.value for answer in answers if answer.path == "strategy"), "auto")
    options = Sections(discovery).class_of(strategy)
    if options and click.confirm(f"Set options of {strategy}?"):
        for name, option in options_of(options).items():
            if not (option.python_only or option.refused or option.section):
                answers.append(_answer(f"{strategy}.{name}", option, discovery, silent))
    return answers


def _core_option(path: str) -> Option:
    section, _, name = path.rpartition(".")
    return options_of(CORE[section] or RunConfig if section else RunConfig)[name]


def _answer(path: str, option: Option, discovery: Discovery, silent: bool) -> Answer:
    default = plain(option.default_for(None))
    if silent:
        return Answer(path, option.sentence, default, default)
    names = _names(path, discovery)
    choices = names or [str(plain(choice)) for choice in option.choices or members(option.kind)]
    one_of = f" One of: {', '.join(choices)}." if choices else ""
    say("", f"{option.sentence}{one_of}")
    shown = "" if default is None else default
    parse = _parser(option, lambda value: _misnamed(path, value, names, discovery))
    value = click.prompt(path, default=shown, value_proc=parse, show_default=bool(shown))
    return Answer(path, option.sentence, plain(value), default)


SLOTS: Final[Mapping[str, tuple[Slot, tuple[str, ...]]]] = {
    "device": ("device", ("auto", "cpu")),
    "strategy": ("strategy", ("auto",)),
    "mixed_precision": ("precision", ("no",)),
}
"""Option that names a plugin -> its slot, and the words that name none."""


def _names(path: str, discovery: Discovery) -> list[str]:
    """Return the possible answers of a question for a plugin, else nothing."""
    if path not in SLOTS:
        return []
    slot, words = SLOTS[path]
    return [*words, *(record.name for record in discovery.of(slot))]


def _misnamed(path: str, value: Any, names: Sequence[str], discovery: Discovery) -> str:
    if not names or value in names or discovery.answering(SLOTS[path][0], value):
        return ""
    return (
        unknown_device(value, discovery)
        if path == "device"
        else not_installed(value, SLOTS[path][0], discovery)
    )


def _parser(option: Option, misnamed: Callable[[Any], str]) -> Callable[[str], Any]:
    def parse(text: Any) -> Any:
        try:
            raw = RawText(text or "null") if isinstance(text, str) else text
            value = convert_option(raw, option)
        except ValueError as error:
            raise click.UsageError(str(error)) from None
        if problem := misnamed(value):
            raise click.UsageError(problem)
        return value

    return parse


def render(answers: Sequence[Answer]) -> str:
    """Return the answers as YAML, each under its option's help, sections last.

    What is the default stays a comment, so that the file does not pin it.
    """
    lines = ["# Settings of accel runs. All options: accel config schema; their origins: accel config show."]
    section = ""
    for answer in sorted(answers, key=lambda answer: "." in answer.path):
        head, _, name = answer.path.rpartition(".")
        if head != section:
            lines += ["", f"{head}:"]
            section = head
        indent = "  " if head else ""
        mark = "# " if answer.value == answer.default else ""
        lines += [
            *([] if head else [""]),
            f"{indent}# {answer.help}",
            f"{indent}{mark}{name or head}: {_scalar(answer.value)}",
        ]
    return "\n".join(lines) + "\n"


def _scalar(value: Any) -> str:
    import yaml

    text: str = yaml.safe_dump(value, default_flow_style=True)
    return text.removesuffix("\n").removesuffix("\n...")

"""Questions of `accel config init`, and the file made from the answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import click
from attrs import Attribute, frozen

from accel_core.cli.terminal import confirm, prompt, say
from accel_core.config.convert import convert_option, members, plain
from accel_core.config.sections import Sections
from accel_core.config.sources import RawText
from accel_core.contract.card import Slot
from accel_core.contract.config import RunConfig
from accel_core.contract.options import default_of, describe, options_of, section_class
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
            answers.append(_answer(path, *_core_option(path), discovery, silent))
    strategy = next((answer.value for answer in answers if answer.path == "strategy"), "auto")
    options = Sections(discovery).class_of(strategy)
    if options and confirm(f"Set options of {strategy}?"):
        for name, (attribute, kind) in options_of(options).items():
            about = describe(attribute)
            if not (about.python_only or about.refused) and section_class(kind) is None:
                answers.append(_answer(f"{strategy}.{name}", attribute, kind, discovery, silent))
    return answers


def _core_option(path: str) -> tuple[Attribute[Any], Any]:
    cls: type = RunConfig
    *sections, name = path.split(".")
    for section in sections:
        cls = section_class(options_of(cls)[section][1]) or cls
    return options_of(cls)[name]


def _answer(path: str, attribute: Attribute[Any], kind: Any, discovery: Discovery, silent: bool) -> Answer:
    about = describe(attribute)
    default = plain(default_of(attribute, None))
    if silent:
        return Answer(path, about.sentence, default, default)
    names = _names(path, discovery)
    choices = names or [str(plain(choice)) for choice in about.choices or members(kind)]
    one_of = f" One of: {', '.join(choices)}." if choices else ""
    say("", f"{about.sentence}{one_of}")
    shown = "" if default is None else default
    parse = _parser(attribute, kind, lambda value: _misnamed(path, value, names, discovery))
    value = prompt(path, shown, parse)
    return Answer(path, about.sentence, plain(value), default)


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


def _parser(attribute: Attribute[Any], kind: Any, misnamed: Callable[[Any], str]) -> Callable[[str], Any]:
    def parse(text: Any) -> Any:
        try:
            raw = RawText(text or "null") if isinstance(text, str) else text
            value = convert_option(raw, attribute, kind)
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

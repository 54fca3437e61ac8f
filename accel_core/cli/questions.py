"""The questions of `accel config init`, made from options, and the commented file of the answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click
from attrs import Attribute, frozen

from accel_core.config.options import default_of, describe, options_of, section_class
from accel_core.config.reader import Reader
from accel_core.config.schema import RunConfig
from accel_core.config.sources import Text
from accel_core.config.structure import MismatchError, convert, plain
from accel_core.plugins import Discovery, Slot

__all__ = ["Answer", "ask", "render"]


@frozen
class Answer:
    """An option, what it is for, and the value it got."""

    path: str
    help: str
    value: Any


def ask(paths: Sequence[str], discovery: Discovery, *, silent: bool = False) -> list[Answer]:
    """Ask for each option on the terminal, then for those of the strategy that was named.

    silent: ask nothing, answer with the defaults.
    """
    answers = [_answer(path, *_core_option(path), discovery, silent) for path in paths]
    strategy = next((answer.value for answer in answers if answer.path == "strategy"), "auto")
    options = Reader(discovery).section(strategy)
    if options and click.confirm(f"Set options of {strategy}?", default=False):
        for name, (attribute, kind) in options_of(options).items():
            if not describe(attribute).python_only and section_class(kind) is None:
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
        return Answer(path, about.sentence, default)
    click.echo(f"\n{about.sentence}{_installed(path, discovery)}")
    shown = "" if default is None else default
    value = click.prompt(path, default=shown, value_proc=_parser(attribute, kind), show_default=bool(shown))
    return Answer(path, about.sentence, plain(value))


def _installed(path: str, discovery: Discovery) -> str:
    slots: dict[str, Slot] = {"device": "device", "strategy": "strategy", "mixed_precision": "precision"}
    if path not in slots:
        return ""
    return f" Installed: {', '.join(record.name for record in discovery.of(slots[path]))}."


def _parser(attribute: Attribute[Any], kind: Any) -> Callable[[str], Any]:
    def parse(text: Any) -> Any:
        try:
            value = convert(Text(text or "null") if isinstance(text, str) else text, kind)
        except MismatchError as mismatch:
            raise click.UsageError(str(mismatch)) from None
        objection = describe(attribute).objection(value)
        if objection:
            raise click.UsageError(objection)
        return value

    return parse


def render(answers: Sequence[Answer]) -> str:
    """The answers as YAML, each under the help of its option; sections after plain options."""
    lines = ["# Settings of accel runs. All options: accel config schema; their origins: accel config show."]
    section = ""
    for answer in sorted(answers, key=lambda answer: "." in answer.path):
        head, _, name = answer.path.rpartition(".")
        if head != section:
            lines += ["", f"{head}:"]
            section = head
        indent = "  " if head else ""
        lines += [
            *([] if head else [""]),
            f"{indent}# {answer.help}",
            f"{indent}{name or head}: {_scalar(answer.value)}",
        ]
    return "\n".join(lines) + "\n"


def _scalar(value: Any) -> str:
    import yaml

    text: str = yaml.safe_dump(value, default_flow_style=True)
    return text.removesuffix("\n").removesuffix("\n...")

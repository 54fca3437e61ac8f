"""Questions of `accel config init`, and the file made from the answers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

import click

from accel_core.config.convert import convert_option, members, plain
from accel_core.config.sections import CORE, Sections
from accel_core.config.sources import RawText
from accel_core.contract.config import RunConfig
from accel_core.contract.options import Option, options_of
from accel_core.plugins.discovery import Discovery

PATHS: Final = (
    "device",
    "strategy",
    "mixed_precision",
    "gradient_accumulation_steps",
    "launch.processes_per_node",
    "launch.nodes",
    "launch.rendezvous",
    "project.project_dir",
)
"""Options that `init` asks for."""
PLUGINS: Final = {
    "device": ("device", "auto", "cpu"),
    "strategy": ("strategy", "auto"),
    "mixed_precision": ("precision", "no"),
}
"""Option that names a plugin -> its slot, and the words that name no plugin."""


def core_options() -> dict[str, Option]:
    """Return the options that `init` asks for, by path."""
    parts = {path: path.rpartition(".") for path in PATHS}
    return {
        path: options_of(CORE[section] or RunConfig if section else RunConfig)[name]
        for path, (section, _, name) in parts.items()
    }


def ask(options: dict[str, Option], discovery: Discovery) -> Iterator[tuple[str, Any]]:
    """Ask for each option on the terminal, then for the strategy's options; yield (path, answer).

    Args:
        options: path -> option to ask for; the options of the strategy are added.
        discovery: the installed plugins.
    """
    answers: dict[str, Any] = {}
    for path, option in options.items():
        if path != "launch.rendezvous" or answers["launch.nodes"] > 1:
            answers[path] = _answer(path, option, discovery)
            yield path, answers[path]
    strategy = answers["strategy"]
    cls = Sections(discovery).class_of(strategy)
    if cls and click.confirm(f"Set options of {strategy}?"):
        for name, option in options_of(cls).items():
            if not (option.python_only or option.refused or option.section):
                options[f"{strategy}.{name}"] = option
                yield f"{strategy}.{name}", _answer(f"{strategy}.{name}", option, discovery)


def _answer(path: str, option: Option, discovery: Discovery) -> Any:
    """Ask until the answer is a valid value of the option."""
    slot, *words = PLUGINS.get(path, ("",))
    names = [*words, *(record.name for record in discovery.of(slot))]
    choices = names or [str(plain(choice)) for choice in option.choices or members(option.kind)]

    def parse(text: str) -> Any:
        word = click.Choice(choices)(text) if choices and text else text
        try:
            return convert_option(RawText(word or "null"), option)
        except ValueError as error:
            raise click.UsageError(str(error)) from None

    one_of = f" One of: {', '.join(choices)}." if choices else ""
    click.echo(f"\n{option.sentence}{one_of}")
    default = plain(option.default_for(None))
    shown = "" if default is None else str(default)
    return plain(click.prompt(path, default=shown, value_proc=parse, show_default=bool(shown)))


def render(options: Mapping[str, Option], answers: Mapping[str, Any]) -> str:
    """Return the answers as YAML, each below its option's help, sections last.

    Defaults are written as comments, so that the file does not pin them.
    """
    import yaml

    lines = ["# Settings of accel runs. All options: accel config schema; their origins: accel config show."]
    section = ""
    for path, option in sorted(options.items(), key=lambda item: "." in item[0]):
        head, _, name = path.rpartition(".")
        if head != section:
            section = head
            lines += ["", f"{section}:"]
        elif not section:
            lines.append("")
        default = plain(option.default_for(None))
        value = answers.get(path, default)
        indent, mark = "  " * bool(section), "# " * (value == default)
        written = yaml.safe_dump([value], default_flow_style=True, width=math.inf).strip()[1:-1]
        lines += [f"{indent}# {option.sentence}", f"{indent}{mark}{name}: {written}"]
    return "\n".join(lines) + "\n"

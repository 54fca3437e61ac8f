"""`accel config`: check, show and write configuration files. Needs no device."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from accel_core.cli.group import Group
from accel_core.cli.terminal import print_table, say
from accel_core.config.jsonschema import whole_schema
from accel_core.config.resolve import Resolved, find_file, load, outside
from accel_core.config.sections import Sections
from accel_core.contract.arguments import did_you_mean
from accel_core.errors import ConfigError
from accel_core.plugins.discovery import discover

_file = click.option("--config", "file", metavar="FILE", help="Read FILE, not ACCEL_CONFIG or ./accel.yaml.")
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group(cls=Group)
def config() -> None:
    """Check, show and write configuration files."""


@config.command()
@_file
@_json
def check(file: str | None, as_json: bool) -> None:
    """Print each mistake in file and environment on a line; exit 1 if there is any."""
    notes: list[str] = []
    try:
        resolved = _load(file)
    except ConfigError as error:
        problems = list(error.problems)
    else:
        from accel_core.launch.plan import Launch

        problems = resolved.unknown_plugins()
        notes = [*resolved.notes, *Launch(resolved, discover()).option_notes()]
    if as_json:
        print(json.dumps({"file": find_file(file), "problems": problems, "notes": notes}, indent=1))
    else:
        say(*(problems or [f"{find_file(file) or 'defaults'}: no mistakes", *notes]))
    sys.exit(1 if problems else 0)


@config.command()
@_file
@_json
def show(file: str | None, as_json: bool) -> None:
    """Print each value and its origin."""
    from accel_core.launch.plan import Launch

    resolved = _load(file)
    rows, notes = (
        list(resolved.rows()),
        [*resolved.notes, *Launch(resolved, discover()).option_notes()],
    )
    if as_json:
        values = [{"path": path, "value": value, "origin": origin} for path, value, origin in rows]
        print(json.dumps({"file": resolved.file, "values": values, "notes": notes}, indent=1))
        return
    say(f"file: {resolved.file or 'none (./accel.yaml does not exist)'}")
    print_table([(path, json.dumps(value), origin) for path, value, origin in rows], header=False)
    say(*notes)


def _load(file: str | None) -> Resolved:
    return load(file=file, discovery=discover(), environment=outside())


@config.command()
@click.argument("section", required=False)
def schema(section: str | None) -> None:
    """Print the JSON Schema of a whole file, or of one SECTION."""
    whole = whole_schema(Sections(discover()))
    sections: Mapping[str, Any] = {n: part for n, part in whole["properties"].items() if "properties" in part}
    if section is not None and section not in sections:
        raise ConfigError(
            f"no section {section!r} can be described here{did_you_mean(section, sections)}\n"
            f"sections: {', '.join(sorted(sections))}"
        )
    print(json.dumps(whole if section is None else sections[section], indent=1))


@config.command()
@click.option("--defaults", is_flag=True, help="Ask nothing, write the defaults.")
@click.option("--output", default="accel.yaml", show_default=True, help="File to write.")
@click.option("--force", is_flag=True, help="Overwrite the file.")
def init(defaults: bool, output: str, force: bool) -> None:
    """Ask a few questions and write a commented file."""
    from accel_core.cli.questions import ask, core_options, render

    if Path(output).exists() and not force:
        raise ConfigError(f"{output} exists already\nuse --force to overwrite it, or --output FILE")
    options, answers = core_options(), {}
    if not defaults:
        from accel_core.launch.plan import Launch

        unset = load(discovery=discover(), environment={}, directory=os.devnull)  # no accel.yaml
        say(f"This machine: {Launch(unset, discover()).hardware()}")
        answers = dict(ask(options, discover()))
    Path(output).write_text(render(options, answers), encoding="utf-8")
    print(f"wrote {output}; `accel config check` looks at it, `accel launch SCRIPT` uses it")

"""The commands of `accel`, and help as text, which needs neither click nor the import of a plugin."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accel_core.plugins.discovery import Record

BUILT_IN: Final = {
    "launch": "Start a script on one or many processes.",
    "submit": "Hand a script to a scheduler, which starts it later.",
    "config": "Check, show and write configuration files.",
    "plugins": "List what is installed, and say what is wrong with it.",
    "env": "Describe this machine, for bug reports.",
}
"""Core's command -> its summary."""

OVERVIEW: Final = """\
Usage: accel [OPTIONS] COMMAND [ARGS]...

  Train on any hardware, under any parallel strategy.

Options:
  --version   Show the version and exit.
  -h, --help  Show this message and exit.

Commands:
"""

HELP: Final = ("-h", "--help")


def added_commands(group: str) -> dict[str, Record]:
    """Return the plugins that add a command to a group, by the command's name.

    A plugin `GROUP-NAME` adds NAME to a group of core; other plugins add their own name to `accel` itself.
    """
    from accel_core.plugins.discovery import discover

    added: dict[str, Record] = {}
    for record in discover().of("command"):
        first, _, rest = record.name.partition("-")
        owner, name = (first, rest) if first in BUILT_IN else ("accel", record.name)
        if owner == group and record.status == "available":
            added[name] = record
    return added


def overview() -> str:
    """Return the help of `accel`: core's commands, and plugins' commands by their cards' summaries."""
    added = {name: it.card.summary for name, it in added_commands("accel").items() if it.card}
    commands = BUILT_IN | added
    width = max(map(len, commands))
    return OVERVIEW + "\n".join(f"  {name:<{width}}  {summary}" for name, summary in commands.items())


def help_of_launch(command: str) -> str:
    """Return the help of `accel launch` or `accel submit`; options of plugins are in `--help-all` only."""
    with open(f"{os.path.dirname(__file__)}/{command}.txt", encoding="utf-8") as file:
        return file.read().rstrip()


def help_as_text(words: Sequence[str]) -> str:
    """Return the help that the command line asks for; empty if click has to write it."""
    if not words or words[0] in HELP:
        return overview()
    if len(words) == 2 and words[0] in ("launch", "submit") and words[1] in HELP:
        return help_of_launch(words[0])
    return ""

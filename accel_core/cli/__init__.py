"""`accel`: one module per command, imported on call; plugins may add commands."""

from __future__ import annotations

import io
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Final

import click

from accel_core.errors import AccelError, LaunchError, PluginError

if TYPE_CHECKING:
    from accel_core.plugins.discovery import Record

__all__ = ["Group", "accel", "main"]

BUILT_IN: Final = {  # each in the module of its name, if not in that of another
    "launch": "Start a script on one or many processes.",
    "submit": "Hand a script to a scheduler, which starts it later.",
    "config": "Check, show and write configuration files.",
    "plugins": "List what is installed, and say what is wrong with it.",
    "env": "Describe this machine, for bug reports.",
}

AUTOLOAD: Final = "TORCH_DEVICE_BACKEND_AUTOLOAD"
"""Variable that torch names if importing one of its extensions fails."""

CONTEXT: Final = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
"""Inherited by every command."""


class Group(click.Group):
    """A click group to which a command plugin `GROUP-NAME` adds the command NAME.

    It answers an unknown command with a similar one, or with the package that has it.
    """

    @property
    def prefix(self) -> str:
        """The beginning of the names of plugins that add to this group."""
        return f"{self.name}-"

    def added(self) -> dict[str, Record]:
        """Return the plugins that add a command, by its name."""
        from accel_core.plugins.discovery import discover

        usable = [record for record in discover().of("command") if record.status == "available"]
        return {it.name.removeprefix(self.prefix): it for it in usable if it.name.startswith(self.prefix)}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*super().list_commands(ctx), *self.added()]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        record = self.added().get(cmd_name)
        if record is not None and record.card is not None:
            from accel_core.plugins.discovery import load

            command: click.Command = load(record, record.card.implementation or "")
            return command
        from accel_core.plugins.catalog import catalog_entry, install_hint

        missing = catalog_entry(f"{self.prefix}{cmd_name}")
        if missing is not None and missing.slot == "command":
            hint = install_hint(missing.folder)
            raise PluginError(f"the command {cmd_name!r} comes with {missing.distribution}\n{hint}")
        return None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the summaries; no plugin is imported for its own."""
        own = super().list_commands(ctx)
        rows = [(name, self.commands[name].get_short_help_str(100)) for name in own]
        self._write_commands(rows, formatter)

    def _write_commands(self, rows: list[tuple[str, str]], formatter: click.HelpFormatter) -> None:
        rows += [(name, record.card.summary) for name, record in self.added().items() if record.card]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not ctx.resilient_parsing and self.get_command(ctx, args[0]) is None:
            from accel_core.contract.arguments import did_you_mean

            ctx.fail(f"No such command {args[0]!r}{did_you_mean(args[0], self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)


class _Lazy(Group):
    """A group that knows names and summaries, and imports only the called command."""

    @property
    def prefix(self) -> str:
        return ""

    def added(self) -> dict[str, Record]:
        # One that is called after a command of ours adds to that.
        return {name: it for name, it in super().added().items() if name.partition("-")[0] not in BUILT_IN}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*BUILT_IN, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in BUILT_IN:
            return super().get_command(ctx, cmd_name)
        module = {"submit": "launch"}.get(cmd_name, cmd_name)
        command: click.Command = getattr(import_module(f"{__name__}.{module}"), cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self._write_commands([*BUILT_IN.items()], formatter)


@click.command("accel", cls=_Lazy, context_settings=CONTEXT)
@click.version_option(package_name="accel-core", prog_name="accel")
def accel() -> None:
    """Train on any hardware, under any parallel strategy."""


def _open_standard_streams() -> None:
    """Open those that the caller closed (`2>&-`) on the null device.

    Else the next file or socket gets their number, and what a library writes to stderr goes into it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest free number
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def main() -> None:
    """Run the console script; print errors of ours without a traceback."""
    _open_standard_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):  # what a POSIX locale cannot spell is escaped, as on stderr
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        accel(prog_name="accel", windows_expand_args=False)
    except AccelError as error:
        print(f"accel: {error}", file=sys.stderr)
        sys.exit(error.exit_code if isinstance(error, LaunchError) else 1)
    except RuntimeError as error:
        if AUTOLOAD not in str(error):
            raise
        cause, _, remedy = str(error).partition(". ")
        print(f"accel: torch cannot be imported: {cause}\n{error.__cause__!r}\n{remedy}", file=sys.stderr)
        sys.exit(1)

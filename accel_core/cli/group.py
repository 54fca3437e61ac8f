"""Groups of commands that plugins extend, and the group `accel`."""

from __future__ import annotations

from importlib import import_module

import click

from accel_core._version import __version__
from accel_core.cli.commands import BUILT_IN, added_commands, overview
from accel_core.contract.arguments import did_you_mean
from accel_core.errors import PluginError


class Group(click.Group):
    """A click group to which a command plugin `GROUP-NAME` adds the command NAME.

    The error for an unknown command names a similar command, or the package that provides the command.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*super().list_commands(ctx), *added_commands(self.name or "")]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        record = added_commands(self.name or "").get(cmd_name)
        if record is not None and record.card is not None:
            from accel_core.plugins.discovery import load

            command: click.Command = load(record, record.card.implementation or "")
            return command
        from accel_core.plugins.catalog import catalog_entry, install_hint

        missing = catalog_entry(cmd_name if self.name == "accel" else f"{self.name}-{cmd_name}")
        if missing is not None and missing.slot == "command":
            hint = install_hint(missing.folder)
            raise PluginError(f"the command {cmd_name!r} comes with {missing.distribution}\n{hint}")
        return None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the summaries; plugins' summaries come from their cards, without importing a plugin."""
        rows = [(name, command.get_short_help_str(100)) for name, command in self.commands.items()]
        added = added_commands(self.name or "").items()
        with formatter.section("Commands"):
            formatter.write_dl(rows + [(name, it.card.summary) for name, it in added if it.card])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not ctx.resilient_parsing and self.get_command(ctx, args[0]) is None:
            ctx.fail(f"No such command {args[0]!r}{did_you_mean(args[0], self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)


class _Accel(Group):
    """The group `accel`, which imports only the command that is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*BUILT_IN, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in BUILT_IN:
            return super().get_command(ctx, cmd_name)
        module = {"submit": "launch"}.get(cmd_name, cmd_name)
        command: click.Command = getattr(import_module(f"accel_core.cli.{module}"), cmd_name)
        return command

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write(overview())


@click.command(
    "accel",
    cls=_Accel,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},  # for all commands
)
@click.version_option(__version__, prog_name="accel")
def accel() -> None:
    """Train on any hardware, under any parallel strategy."""

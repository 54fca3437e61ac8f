"""`accel plugins check`: the conformance kit from the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from difflib import get_close_matches

import click

from accel_core import PluginError, discover
from accel_testing.simulated import CARD

__all__ = ["check"]


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("stack")
@click.option("--world", help="Numbers of processes; unset: 1, and 2 too where a strategy is named.")
@click.option("--quick", is_flag=True, help="Levels 0 and 1 and a few other checks, in some 15 seconds.")
@click.argument("pytest_args", nargs=-1, type=click.UNPROCESSED)
def check(stack: str, world: str | None, quick: bool, pytest_args: tuple[str, ...]) -> None:
    """Run the conformance tests on STACK: a plugin's name, or several joined by +.

    `sim` in it is a simulated device, for machines that have none.
    """
    installed = [record.name for record in discover().records]
    for name in stack.split("+"):
        if name not in (CARD.name, *installed):
            close = get_close_matches(name, installed, 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise PluginError(
                f"no plugin {name!r} is installed{hint}\n`accel plugins` lists them", plugin=name
            )
    command = [sys.executable, "-m", "pytest", "--pyargs", "accel_testing", "--accel-stack", stack]
    if world:
        command += ["--accel-world", world]
    if quick:
        command.append("--accel-quick")
    command += ["-o", "console_output_style=classic"]  # the kit itself tells how much is left
    # Neither the settings nor the cache of a project that happens to lie around.
    command += ["-c", os.devnull, "--rootdir", os.curdir, "-p", "no:cacheprovider", *pytest_args]
    sys.exit(subprocess.run(command, check=False).returncode)

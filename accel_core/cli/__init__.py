"""`accel`: one module per command, imported on call; plugins may add commands.

The help of `accel`, `accel launch` and `accel submit` is text: it needs neither click nor a plugin's import.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Final

from accel_core.cli.commands import help_as_text
from accel_core.errors import AccelError, LaunchError

__all__ = ["main"]

AUTOLOAD: Final = "TORCH_DEVICE_BACKEND_AUTOLOAD"
"""Variable that torch's error names if the import of a torch extension fails."""


def _open_standard_streams() -> None:
    """Open the standard streams that the caller closed (`2>&-`) on the null device.

    Otherwise the next file or socket gets the number of stderr, and a library's messages go into it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest free number
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def main() -> None:
    """Run the console script; print AccelErrors without a traceback."""
    _open_standard_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a POSIX locale lacks characters: escape as stderr does
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        if text := help_as_text(sys.argv[1:]):
            print(text)
            return
        from accel_core.cli.group import accel

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

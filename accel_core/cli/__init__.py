"""`accel`: one module per command, imported on call; plugins may add commands.

Help that people read while they wait is text: it needs neither click nor the import of a plugin.
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
"""Variable that torch names if importing one of its extensions fails."""


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

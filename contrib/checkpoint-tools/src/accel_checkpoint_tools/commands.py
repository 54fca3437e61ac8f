"""`accel checkpoint diff` and `accel checkpoint show`."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

from accel_core import AccelError, CheckpointFiles
from accel_inspect.state import SECTIONS

__all__ = ["diff", "show"]

_DIFFERENT, _ERROR = 1, 2
_tolerance = click.FloatRange(0)
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


class _Folder(click.Path):
    """A checkpoint on this machine, or at a URL, which stays text.

    `~` is the home folder.
    """

    def __init__(self) -> None:
        super().__init__(exists=True, file_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        is_url = "://" in str(value)
        return str(value) if is_url else super().convert(Path(value).expanduser(), param, ctx)


def _failing_with(code: int, call: Callable[[], int]) -> int:
    """Return what `call` returns; an error is printed, and is this code."""
    try:
        return call()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (AccelError, OSError) as error:
        click.echo(f"accel: {error}", err=True)
    except Exception as error:  # a file says what no save writes: status 1 would be a result
        click.echo(f"accel: this cannot be understood: {error!r}\nrun `accel checkpoint verify`", err=True)
    return code


def _print(lines: Iterable[str]) -> None:
    """Print lines, what would move the cursor in names as escapes.

    A reader that has read enough, such as `head`, is not an error.
    """
    text = "\n".join(
        "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in line)
        for line in lines
    )
    try:
        click.echo(text)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@click.command()
@click.argument("a", type=_Folder())
@click.argument("b", type=_Folder())
@click.option(
    "--only", multiple=True, type=click.Choice([*SECTIONS]), help="A section to compare; repeatable."
)
@click.option("--rtol", default=0.0, type=_tolerance, help="Relative tolerance of elements.")
@click.option("--atol", default=0.0, type=_tolerance, help="Absolute tolerance of elements.")
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Write a page with heat maps.")
@_json
def diff(
    a: Path | str,
    b: Path | str,
    only: tuple[str, ...],
    rtol: float,
    atol: float,
    html: Path | None,
    as_json: bool,
) -> None:
    """Say how the checkpoints A and B differ.

    The two may come from different stacks and numbers of processes. Elements with |a - b| <= atol + rtol *
    |b| are equal, and NaN equals NaN.

    Exit status: 0 if both hold the same state, 1 if not, 2 if they cannot be compared. Sections config and
    stack are shown, and count only if --only names them.
    """
    from accel_inspect.diff import compare
    from accel_inspect.measure import Tolerance
    from accel_inspect.page import page
    from accel_inspect.report import as_plain, lines

    def call() -> int:
        opened = CheckpointFiles.open(a), CheckpointFiles.open(b)
        found = compare(*opened, only=only, tolerance=Tolerance(rtol, atol))
        if html is not None:
            html.write_text(page(found), encoding="utf-8", errors="backslashreplace")
        _print(json.dumps(as_plain(found), indent=1).split("\n") if as_json else lines(found))
        return _DIFFERENT if found.differs else 0

    sys.exit(_failing_with(_ERROR, call))


@click.command()
@click.argument("folder", type=_Folder())
@_json
def show(folder: Path | str, as_json: bool) -> None:
    """Show the tensors of the checkpoint FOLDER as a tree, with their files."""
    from accel_inspect.tree import as_rows, lines

    def call() -> int:
        opened = CheckpointFiles.open(folder)
        _print(json.dumps(as_rows(opened), indent=1).split("\n") if as_json else lines(opened))
        return 0

    sys.exit(_failing_with(_ERROR, call))

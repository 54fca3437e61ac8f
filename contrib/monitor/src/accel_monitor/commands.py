"""`accel report` and `accel watch`."""

from __future__ import annotations

from pathlib import Path

import click

__all__ = ["report", "watch"]


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN [RUN]...", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a page with curves to this file, to be opened in a browser.",
)
def report(runs: tuple[Path, ...], output: Path | None) -> None:
    """Show what RUN did: curves, where its time went, memory, checkpoints, restarts.

    RUN is the project_dir of a run (its latest record), or a file of its folder records.
    """
    from accel_monitor.records import find, read

    records = read(runs)
    for run, record in zip(runs, records, strict=True):
        others = len(find(run)) - 1
        if others:
            click.echo(f"{run}: {others} other record(s) there; shown is {record.path.name}", err=True)
    if output is None:
        from accel_monitor.terminal import console, summary

        screen = console()
        screen.print(summary(records, screen.width))
        return
    from accel_monitor.page import page

    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(page(records), encoding="utf-8", errors="backslashreplace")
    except ModuleNotFoundError as error:  # installed without its dependencies
        package = str(error.name).partition(".")[0]
        raise click.ClickException(
            f"a page needs the package {package}, which is not installed\n"
            f"pip install {package}; without --output a summary is printed here"
        ) from error
    except OSError as error:
        raise click.FileError(str(output), str(error)) from error
    click.echo(output)


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--steps", type=click.IntRange(1), help="Steps that the run will do, to say when it ends.")
@click.option("--once", is_flag=True, help="Print one screen, and end.")
def watch(run: Path, steps: int | None, once: bool) -> None:
    """Show RUN while it trains, on one screen, until it ends or you press Ctrl-C.

    RUN is the project_dir of a run of any process or machine. Without a terminal: a line a minute.
    """
    from accel_monitor.watching import watch_run

    watch_run(run, steps=steps, once=once)

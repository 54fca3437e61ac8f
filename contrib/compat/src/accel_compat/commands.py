"""`accel compat launch | shim | import`, and the `accelerate` script of a shim."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click

from accel_core import AccelError

__all__ = ["accelerate", "compat"]

_DEFAULT = Path("~/.cache/huggingface/accelerate/default_config.yaml")
_EXTRA = {"ignore_unknown_options": True, "help_option_names": []}


@click.group()
def compat() -> None:
    """Run programs written for Accelerate."""


@compat.command(context_settings=_EXTRA)
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def launch(words: tuple[str, ...]) -> None:
    """Start a script by accelerate launch's own flags and config file; its `accelerate` is this one."""
    sys.exit(_launch(words))


def _launch(words: tuple[str, ...]) -> int:
    from accel_compat import launching, settings

    asked = settings.parse(words, _DEFAULT.expanduser())
    if asked.file is not None:
        click.echo(f"accel-compat: reads {asked.file}", err=True)
    return launching.launch(asked)


@compat.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
def shim(folder: Path) -> None:
    """Write FOLDER, which on PYTHONPATH makes `import accelerate` mean this package's."""
    from accel_compat.shim import write_shim

    write_shim(folder)
    click.echo(f"export PYTHONPATH={folder.absolute()} PATH={folder.absolute() / 'bin'}:$PATH")


@compat.command("import")
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Else it is printed.")
def import_(file: str, output: Path | None) -> None:
    """Turn a YAML FILE that accelerate config wrote into accel's."""
    import yaml

    from accel_compat.converting import convert
    from accel_compat.settings import read_file

    done = convert(read_file(file))
    text = yaml.safe_dump(dict(done.config), sort_keys=False) if done.config else "{}\n"
    for name, why in done.dropped.items():
        click.echo(f"accel-compat: left out {name}: {why}", err=True)
    if output is None:
        click.echo(text, nl=False)
    elif output.exists():
        raise click.ClickException(f"{output} is there already\nname another file")
    else:
        output.write_text(text)


def accelerate() -> None:
    """The `accelerate` script: launch is served, env shows accel's; the rest says what to call instead."""
    name, *words = sys.argv[1:] or ["--help"]
    try:
        if name == "launch":
            sys.exit(_launch(tuple(words)))
        if name == "env":
            from accel_compat.launching import accel

            sys.exit(subprocess.run([accel(), "env", *words], check=False).returncode)  # noqa: S603  ours
    except AccelError as error:
        sys.exit(f"accelerate: {error}")
    sys.exit(
        f"accelerate {name} is not served by accel-compat: `accel config`, `accel checkpoint` and"
        " `accel plugins` stand for it\n`accel --help` lists them; accelerate launch works here"
    )

"""`accel compat launch | import`, and the script `accelerate`."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import click

from accel_core import AccelError

_PARSERS = {
    "config": "config_questions:config_command_parser",
    "config default": "config_questions:default_command_parser",
    "config update": "config_questions:update_command_parser",
    "env": "subcommands:env_command_parser",
    "estimate-memory": "memory_estimate:estimate_command_parser",
    "merge-weights": "weight_merging:merge_command_parser",
    "test": "subcommands:test_command_parser",
    "to-fsdp2": "subcommands:to_fsdp2_command_parser",
    "tpu-config": "subcommands:tpu_command_parser",
}
"""Command -> the module of this room and the function that makes its parser."""
_USAGE = """\
usage: accelerate {config, config default, config update, env, estimate-memory, launch, merge-weights, test,
                   to-fsdp2, tpu-config} ...
`accel --help` lists accel's own commands"""
_EXTRA = {"ignore_unknown_options": True, "help_option_names": []}


@click.group()
def compat() -> None:
    """Run programs written for Accelerate."""


@compat.command(context_settings=_EXTRA)
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def launch(words: tuple[str, ...]) -> None:
    """Start a script by `accelerate launch`'s flags and file, with our `accelerate`."""
    sys.exit(_launch(words))


def default_file() -> Path:
    """Path of Accelerate's default config file."""
    caches = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    folder = Path(os.environ.get("HF_HOME", f"{caches}/huggingface"))
    return folder.expanduser() / "accelerate" / "default_config.yaml"


def _launch(words: tuple[str, ...]) -> int:
    from accel_compat.launch.request import parse
    from accel_compat.launch.workers import launch as start

    request = parse(words, default_file())
    if request.file is not None:
        click.echo(f"accel-compat: reads {request.file}", err=True)
    return start(request)


@compat.command("import")
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Else it is printed.")
def import_(file: str, output: Path | None) -> None:
    """Turn a YAML FILE that accelerate config wrote into accel's."""
    import yaml

    from accel_compat.launch.convert import convert
    from accel_compat.launch.request import read_file

    done = convert(read_file(file))
    text = yaml.safe_dump(dict(done.config), sort_keys=False) if done.config else "{}\n"
    for name, why in done.dropped.items():
        click.echo(f"accel-compat: left out {name}: {why}", err=True)
    if output is not None and output.exists():
        raise click.ClickException(f"{output} is there already\nname another file")
    if problems := _problems(text):
        said = f"{file} asks for what accel refuses\n{problems}\nchange these, and import again"
        raise click.ClickException(said)
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        output.write_text(text)
    except OSError as error:
        raise click.FileError(str(output), str(error)) from error


def _problems(text: str) -> str:
    """Ask `accel config check` about a config, without this shell's variables."""
    from accel_compat.launch.workers import accel

    clean = {name: value for name, value in os.environ.items() if not name.startswith("ACCEL_")}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "accel.yaml")
        path.write_text(text)
        words = [accel(), "config", "check", "--config", str(path)]
        done = subprocess.run(words, env=clean, capture_output=True, text=True, check=False)  # noqa: S603  ours
        return (done.stdout + done.stderr).replace(f"{folder}/", "").strip() if done.returncode else ""


def accelerate(*first: str) -> None:
    """Run the `accelerate` script.

    A command that accel-compat does not serve exits with a message on what to call instead.

    first: words before those of the command line, of scripts such as `accelerate-launch`.
    """
    if not [*first, *sys.argv[1:]]:
        click.echo(_USAGE)
        sys.exit(1)
    name, *words = [*first, *sys.argv[1:]]
    try:
        if name in ("-h", "--help"):
            click.echo(_USAGE)
            sys.exit(0)
        if name == "launch":
            sys.exit(_launch(tuple(words)))
        if (several := " ".join([name, *words[:1]])) in _PARSERS:
            name, words = several, words[1:]
        if name in _PARSERS:
            sys.exit(_called(name, words))
    except AccelError as error:
        sys.exit(f"accelerate: {error}")
    click.echo(f"{_USAGE}\naccelerate: error: invalid choice: {name!r}\nchoose one of these", err=True)
    sys.exit(2)


def _called(name: str, words: Sequence[str]) -> int:
    import yaml

    module, _, make_parser = _PARSERS[name].partition(":")
    *above, command = name.split(" ")
    parser = argparse.ArgumentParser(" ".join(["accelerate", *above]), allow_abbrev=False)
    getattr(import_module(f"accel_compat.launch.{module}"), make_parser)(parser.add_subparsers())
    asked = parser.parse_args([command, *words])
    try:
        asked.func(asked)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise AccelError(f"{name}: {error}\n`accelerate {name} --help` lists its flags") from error
    except click.Abort as error:
        raise AccelError(
            f"{name}: the answers ended before the questions, and no file is written\n"
            "answer each, or call `accelerate config default`, which asks nothing"
        ) from error
    return 0

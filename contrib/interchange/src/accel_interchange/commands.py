"""`accel checkpoint import|export --format accelerate|dcp|deepspeed`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from accel_core import CheckpointContents, CheckpointError

__all__ = ["accelerate", "dcp", "deepspeed"]

_folder = click.Path(exists=True, file_okay=False, path_type=Path)
_like = click.option(
    "--like",
    type=_folder,
    required=True,
    help="A checkpoint that the same script saves now, before it trains: it tells what cannot be read from"
    " FOLDER, such as the names of the optimizer's parameters.",
)
_unit = click.option("--unit", help="The unit; needed if there are several.")
_model = click.option("--model", default="model", show_default=True, help="The key of the model.")
_optimizer = click.option("--optimizer", default="optimizer", show_default=True, help="Of the optimizer.")


def _source(command: Callable[..., None]) -> Callable[..., None]:
    target = click.argument("target", type=click.Path(path_type=Path))
    return click.argument("folder", type=_folder)(target(command))


@click.group()
def accelerate() -> None:
    """Folders of Accelerate 1.x's save_state."""


@accelerate.command("import")
@_source
@_like
def import_accelerate(folder: Path, target: Path, like: Path) -> None:
    """Write the checkpoint TARGET from FOLDER. Runs no code found in it."""
    from accel_interchange.accelerate import read

    contents = CheckpointContents.read(like)
    _left_out(read(folder, contents))
    click.echo(contents.write(target))


@accelerate.command("export")
@_source
def export_accelerate(folder: Path, target: Path) -> None:
    """Write TARGET, which Accelerate's load_state reads, from the checkpoint FOLDER."""
    from accel_interchange.accelerate import write

    with _beside(target) as beside:
        _left_out(write(CheckpointContents.read(folder), beside))


@click.group()
def dcp() -> None:
    """Folders of torch.distributed.checkpoint."""


@dcp.command("import")
@_source
@_like
@_unit
@_model
@_optimizer
def import_dcp(folder: Path, target: Path, like: Path, unit: str | None, model: str, optimizer: str) -> None:
    """Write the checkpoint TARGET from FOLDER. Runs no code found in it."""
    from accel_interchange.dcp import read

    contents = CheckpointContents.read(like)
    _left_out(read(folder, contents, _one_unit(contents, unit, like), model, optimizer))
    click.echo(contents.write(target))


@dcp.command("export")
@_source
@_unit
@_model
@_optimizer
def export_dcp(folder: Path, target: Path, unit: str | None, model: str, optimizer: str) -> None:
    """Write TARGET for torch.distributed.checkpoint from the checkpoint FOLDER."""
    from accel_interchange.dcp import write

    contents = CheckpointContents.read(folder)
    with _beside(target) as beside:
        _left_out(write(contents, beside, _one_unit(contents, unit, folder), model, optimizer))


@click.group()
def deepspeed() -> None:
    """Folders of DeepSpeed's save_checkpoint, and universal ones."""


@deepspeed.command("import")
@_source
@_like
@_unit
def import_deepspeed(folder: Path, target: Path, like: Path, unit: str | None) -> None:
    """Write the checkpoint TARGET from FOLDER.

    Runs no code found in it, and needs no DeepSpeed.
    """
    from accel_interchange.deepspeed import read

    contents = CheckpointContents.read(like)
    _left_out(read(folder, contents, _one_unit(contents, unit, like)))
    click.echo(contents.write(target))


def _one_unit(contents: CheckpointContents, unit: str | None, folder: Path) -> str:
    units = list(contents.state["units"])
    if unit in units or (unit is None and len(units) == 1):
        return unit or units[0]
    raise CheckpointError(
        f"{folder} has the units {', '.join(units)}\nchoose one of them with --unit", path=str(folder)
    )


def _left_out(what: list[str]) -> None:
    for each in what:
        click.echo(f"left out: {each}", err=True)


@contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """Yield a folder to write into; once complete it takes the target's name."""
    if target.exists():
        raise CheckpointError(
            f"{target} exists\nexport to another folder, or move this one away", path=str(target)
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        prefix = f".{target.name}."
        with tempfile.TemporaryDirectory(prefix=prefix, suffix=".partial", dir=target.parent) as made:
            beside = Path(made) / target.name
            beside.mkdir()
            yield beside
            beside.rename(target)
    except OSError as error:
        raise CheckpointError(
            f"{target} could not be written: {error}\nexport to another folder, or free some space",
            path=str(target),
        ) from error
    click.echo(target)

"""`accel checkpoint`: list, show, verify, export, diff and import."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import click

from accel_checkpoint_tools.sections import SECTIONS
from accel_checkpoint_tools.text import show as print_lines
from accel_checkpoint_tools.text import table
from accel_core import AccelError, CheckpointError, storage_at

__all__ = ["checkpoint"]

_UNIT: Final = ("unit",)
_KEYS: Final = ("unit", "model", "optimizer")
_WEIGHTS: Final = ("unit", "prefix", "max_shard_size", "force")
EXPORTS: Final[Mapping[str, tuple[str, ...]]] = {
    "safetensors": _WEIGHTS,
    "torch": _WEIGHTS,
    "dcp": _KEYS,
    "accelerate": (),
}
"""Formats that are written, and the options that each takes."""
IMPORTS: Final[Mapping[str, tuple[str, ...]]] = {"dcp": _KEYS, "deepspeed": _UNIT, "accelerate": ()}
"""Formats that are read, and the options that each takes beside `--like`."""
_COLUMNS: Final = ("name", "step", "age", "size", "ranks", "stack", "metrics", "valid")
_DIFFERENT, _ERROR = 1, 2


class _Place(click.Path):
    """A folder on this machine that exists, where `~` is the home folder; or a URL of a store."""

    def __init__(self) -> None:
        super().__init__(exists=True, file_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if "://" in str(value):
            return str(value)
        return super().convert(str(Path(value).expanduser()), param, ctx)


_folder = click.argument("folder", type=_Place())
_target = click.argument("target")
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_unit = click.option("--unit", help="The unit; needed if there are several, but for weights.")
_model = click.option("--model", help="dcp: the key of the model.  [default: model]")
_optimizer = click.option("--optimizer", help="dcp: the key of the optimizer.  [default: optimizer]")


@click.group()
def checkpoint() -> None:
    """List, show, verify, export, compare and import checkpoints."""


@checkpoint.command("list")
@click.argument("folder", default=".", type=_Place())
@_json
def list_(folder: str, as_json: bool) -> None:
    """List the checkpoints in FOLDER; or, if FOLDER is one, the parameters in it.

    VALID looks at what describes the data and at the sizes of files; verify reads every byte.
    """
    from accel_checkpoint_tools import listing

    place = storage_at(folder)
    found: Any
    if listing.is_checkpoint(place):
        parameters = list(listing.parameters(listing.opened(place)))
        found = {**listing.described(place), "parameters": parameters}
        rows = [
            ("UNIT", "NAME", "SHAPE", "DTYPE"),
            *(tuple(map(_cell, each.values())) for each in parameters),
        ]
        lines = [*_listed([found]), "", *table(rows)]
    else:
        found = sorted(map(listing.described, listing.inside(place)), key=lambda row: row["time"])
        lines = [*_listed(found)] if found else [f"no checkpoint in {folder}"]
    print_lines(json.dumps(found, indent=1).split("\n") if as_json else lines)


def _listed(rows: list[dict[str, Any]]) -> Iterator[str]:
    columns = [each for each in _COLUMNS if each != "metrics" or any(row["metrics"] for row in rows)]
    return table(
        [[each.upper() for each in columns], *([_cell(row[each]) for each in columns] for row in rows)]
    )


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {float(number):.6g}" for name, number in value.items()) or "-"
    return str(value) if value is not None else "-"


@checkpoint.command()
@click.argument("folders", nargs=-1, required=True, type=_Place())
@_json
def verify(folders: tuple[str, ...], as_json: bool) -> None:
    """Read every byte of the checkpoints FOLDERS, or in them, and name damaged files.

    Exit status 1 if there is one.
    """
    from accel_checkpoint_tools import listing

    places = {folder: storage_at(folder) for folder in folders}
    chosen = {
        folder: [place] if listing.is_checkpoint(place) else listing.inside(place)
        for folder, place in places.items()
    }
    if empty := [folder for folder, inside in chosen.items() if not inside]:
        raise CheckpointError(f"no checkpoint in {', '.join(empty)}\ngive the folder of one")
    problems = {
        str(one).replace(str(places[folder]), folder, 1): listing.problems_of(one)
        for folder, inside in chosen.items()
        for one in inside
    }
    if as_json:
        click.echo(json.dumps(problems, indent=1))
    else:
        for folder, found in problems.items():
            print_lines(found or [f"{folder}: OK"])
    sys.exit(1 if any(problems.values()) else 0)


# -- other formats ------------------------------------------------------------------------------------


@checkpoint.command()
@_folder
@_target
@click.option(
    "--format",
    "form",
    type=click.Choice([*EXPORTS]),
    default="safetensors",
    show_default=True,
    help="Of TARGET.",
)
@_unit
@click.option("--prefix", help="safetensors, torch: of keys, such as values/app/model; default: models.")
@click.option("--max-shard-size", help="safetensors, torch: of a file.  [default: 10GB]")
@click.option("--force", is_flag=True, default=None, help="safetensors, torch: replace weights in TARGET.")
@_model
@_optimizer
def export(folder: str, target: str, form: str, **options: Any) -> None:
    """Write the checkpoint FOLDER to TARGET in the format of another library.

    safetensors, torch: the weights alone, whole, as from_pretrained reads them; of every unit, each in a
    folder if there are several. dcp: weights and optimizer for torch.distributed.checkpoint. accelerate: what
    load_state of Accelerate 1.x reads.
    """
    chosen = _chosen(form, EXPORTS[form], options)
    if form in ("safetensors", "torch"):
        from accel_checkpoint_tools import weights

        limit, force = chosen.pop("max_shard_size", "10GB"), chosen.pop("force", False)
        unit, prefix, safe = chosen.pop("unit", None), chosen.pop("prefix", None), form == "safetensors"
        homes, left_out = weights.export(
            folder, target, unit=unit, prefix=prefix, limit=limit, safe=safe, force=force
        )
        _finish(left_out, "\n".join(homes))
        return
    from accel_checkpoint_tools.contents import Contents
    from accel_checkpoint_tools.files import beside

    with Contents.open(folder) as contents, beside(Path(target).expanduser()) as made:
        if "unit" in EXPORTS[form]:
            chosen["unit"] = contents.one_unit(chosen.get("unit"))
        remedy = "--format safetensors --prefix {prefix} writes those of one"
        contents.require_weights(folder, remedy, chosen.get("unit"))
        left_out = import_module(f"accel_checkpoint_tools.{form}").write(contents, made, **chosen)
        left_out += contents.without_place
    _finish(left_out, target)


@checkpoint.command("import")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@_target
@click.option("--format", "form", type=click.Choice([*IMPORTS]), required=True, help="What FOLDER is.")
@click.option(
    "--like",
    type=_Place(),
    required=True,
    help="A checkpoint that the same script saves now, before it trains: it tells what cannot be read from"
    " FOLDER, such as the names of the optimizer's parameters.",
)
@_unit
@_model
@_optimizer
def import_(folder: Path, target: str, form: str, like: str, **options: Any) -> None:
    """Write the checkpoint TARGET from FOLDER, which another library has saved.

    Runs no code found in FOLDER, and needs none of these libraries.
    """
    from accel_checkpoint_tools.contents import Contents

    chosen = _chosen(form, IMPORTS[form], options)
    with Contents.open(like) as contents:
        if "unit" in IMPORTS[form]:
            chosen["unit"] = contents.one_unit(chosen.get("unit"))
        remedy = "give --like a checkpoint with weights, as Accelerator.save_state writes one"
        contents.require_weights(like, remedy, chosen.get("unit"))
        left_out = import_module(f"accel_checkpoint_tools.{form}").read(folder, contents, **chosen)
        left_out += [f"{each}: they are those of --like" for each in contents.without_place]
        place = contents.write(target)
    _finish(left_out, str(place))


def _chosen(form: str, known: tuple[str, ...], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that were given. Those of other formats are refused."""
    chosen = {name: value for name, value in options.items() if value is not None}
    for name in chosen:
        if name not in known:
            raise click.UsageError(f"--format {form} takes no --{name.replace('_', '-')}")
    return chosen


def _finish(left_out: list[str], target: str) -> None:
    for each in left_out:
        click.echo(f"left out: {each}", err=True)
    click.echo(target)


# -- what is in them ----------------------------------------------------------------------------------


@checkpoint.command()
@_folder
@_json
def show(folder: str, as_json: bool) -> None:
    """Show the tensors of the checkpoint FOLDER as a tree, with their files."""
    from accel_checkpoint_tools.tree import as_rows, lines
    from accel_core import Checkpoint, open_checkpoint

    def call() -> int:
        with open_checkpoint(storage_at(folder)) as files:
            opened = Checkpoint.with_tensors(files)
            print_lines(json.dumps(as_rows(opened), indent=1).split("\n") if as_json else lines(opened))
        return 0

    sys.exit(_status(call))


@checkpoint.command()
@click.argument("a", type=_Place())
@click.argument("b", type=_Place())
@click.option(
    "--only", multiple=True, help=f"A section to compare; repeatable: {', '.join(SECTIONS)}, or another one."
)
@click.option("--rtol", default=0.0, type=click.FloatRange(0), help="Relative tolerance of elements.")
@click.option("--atol", default=0.0, type=click.FloatRange(0), help="Absolute tolerance of elements.")
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Write a page with heat maps.")
@_json
def diff(
    a: str, b: str, only: tuple[str, ...], rtol: float, atol: float, html: Path | None, as_json: bool
) -> None:
    """Say how the checkpoints A and B differ.

    The two may come from different stacks and numbers of processes. Elements with |a - b| <= atol + rtol *
    |b| are equal, and NaN equals NaN.

    Exit status: 0 if both hold the same state, 1 if not, 2 if they cannot be compared. Sections config,
    stack and run are shown, and count only if --only names them.
    """
    from accel_checkpoint_tools.diff import compare
    from accel_checkpoint_tools.measure import Tolerance
    from accel_checkpoint_tools.page import page
    from accel_checkpoint_tools.report import as_plain, lines
    from accel_core import Checkpoint, open_checkpoint

    def call() -> int:
        with open_checkpoint(storage_at(a)) as one, open_checkpoint(storage_at(b)) as other:
            both = Checkpoint.with_tensors(one), Checkpoint.with_tensors(other)
            found = compare(*both, only=only, tolerance=Tolerance(rtol, atol))
        if html is not None:
            html.write_text(page(found), encoding="utf-8", errors="backslashreplace")
        print_lines(json.dumps(as_plain(found), indent=1).split("\n") if as_json else lines(found))
        return _DIFFERENT if found.differs else 0

    sys.exit(_status(call))


def _status(call: Callable[[], int]) -> int:
    """Return what `call` returns; an error is printed, and has a status that is no result."""
    try:
        return call()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (AccelError, OSError) as error:
        click.echo(f"accel: {error}", err=True)
    except Exception as error:  # a file says what no save writes: status 1 would be a result
        click.echo(f"accel: this cannot be understood: {error!r}\nrun `accel checkpoint verify`", err=True)
    return _ERROR

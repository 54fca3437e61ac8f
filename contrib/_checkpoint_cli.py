"""`accel checkpoint`: list, verify and convert checkpoints."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from accel_core.checkpoint.stored import Place, place
from accel_core.cli import Group
from accel_core.cli.terminal import table
from accel_core.errors import CheckpointError, PluginError
from accel_core.plugins.discovery import discover, load

if TYPE_CHECKING:
    from accel_core.checkpoint.files import DataFile
    from accel_core.checkpoint.reader import CheckpointFiles

_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


class _Place(click.Path):
    """A path of this machine, where `~` is the home folder, or a URL of a store."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        where = place(value)
        return super().convert(where, param, ctx) if isinstance(where, Path) else where


_folder = _Place(exists=True, file_okay=False, path_type=Path)
_target = click.argument("target", type=_Place(path_type=Path))
_more = click.argument("more", nargs=-1, type=click.UNPROCESSED)
_COLUMNS: Final = ("name", "step", "age", "size", "ranks", "stack", "valid")
_TIMES: Final = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
_SIZES: Final = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1))
_FORWARDING: Final = {"ignore_unknown_options": True}
"""Settings of commands that pass other options on to the plugin of a format."""


@click.group(cls=Group)
def checkpoint() -> None:
    """List, verify, export and import checkpoints; plugins may add commands."""


@checkpoint.command("list")
@click.argument("folder", default=".", type=_folder)
@_json
def list_(folder: Place, as_json: bool) -> None:
    """List the checkpoints in FOLDER; or, if FOLDER is one, the parameters in it.

    VALID looks at what describes the data and at the sizes of files; verify reads every byte.
    """
    from accel_core.checkpoint.reader import CheckpointFiles

    if _is_one(folder):
        parameters = list(_parameters(CheckpointFiles.open(folder)))
        found: Any = {**_describe(folder), "parameters": parameters}
        lines = [*_table(_COLUMNS, [found]), "", *_table(("unit", "name", "shape", "dtype"), parameters)]
    else:
        found = sorted(map(_describe, _inside(folder)), key=lambda row: row["time"])
        columns = (
            *_COLUMNS[:-1],
            *(("metrics",) if any(row["metrics"] for row in found) else ()),
            _COLUMNS[-1],
        )
        lines = list(_table(columns, found)) if found else [f"no checkpoint in {folder}"]
    print(json.dumps(found, indent=1) if as_json else "\n".join(lines))


def _table(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    cells = [[_cell(row[column]) for column in columns] for row in rows]
    return table([[column.upper() for column in columns], *cells])


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {float(number):.6g}" for name, number in value.items()) or "-"
    return str(value) if value is not None else "-"


def _is_one(folder: Place) -> bool:
    """Return True if the folder is a checkpoint, damaged or not."""
    from accel_core.checkpoint.manifest import MANIFEST, is_there

    return (folder / MANIFEST).exists() if isinstance(folder, Path) else is_there(folder)


def _inside(folder: Place) -> list[Place]:
    """Return the checkpoints in a folder, or in its `checkpoints`.

    Damaged ones too, unfinished ones not.
    """
    from accel_core.checkpoint.manifest import MANIFEST

    if not isinstance(folder, Path):
        entries = [*folder.iterdir(), *(folder / "checkpoints").iterdir()]
        return [entry for entry in entries if entry.size is None and _is_one(entry)]
    found = sorted([*folder.glob(f"*/{MANIFEST}"), *folder.glob(f"checkpoints/*/{MANIFEST}")])
    return [path.parent for path in found if not path.parent.name.startswith(".")]


def _describe(folder: Place) -> dict[str, Any]:
    from accel_core.checkpoint.manifest import read_manifest
    from accel_core.checkpoint.reader import CheckpointFiles

    row: dict[str, Any] = {
        **dict.fromkeys((*_COLUMNS, "bytes", "metrics")),
        "name": folder.name or Path.cwd().name,
        "path": str(folder),
    }
    row |= {"time": "", "valid": "yes"}
    try:
        manifest = read_manifest(folder)
        about, size = manifest.members, sum(record.size for record in manifest.files.values())
        age = datetime.now(timezone.utc) - datetime.fromisoformat(about["time"])
        row |= {"step": about["step"], "time": about["time"], "ranks": about["world"]["size"]}
        row |= {"age": _short(age.total_seconds(), _TIMES), "bytes": size, "size": _short(size, _SIZES)}
        row["metrics"] = about.get("metrics", {})
        row["stack"] = about["stack"]["summary"]
        CheckpointFiles.open(folder)
    except CheckpointError as error:
        row["valid"] = _first_line(error)
    return row


def _short(value: float, scale: Sequence[tuple[str, float]]) -> str:
    unit, size = next((each for each in scale if value >= each[1]), scale[-1])
    return f"{value / size:.0f} {unit}"


def _parameters(opened: CheckpointFiles) -> Iterator[dict[str, Any]]:
    from accel_core.checkpoint.files import understanding

    tensors: dict[tuple[str, str], dict[str, Any]] = {}
    for rank, (data, _) in opened.shares.items():
        with understanding(data.path.with_suffix(".json")):
            for unit, key, outline, _ in opened.described(rank, _outline):
                tensors[unit, key] = outline
    for (unit, key), outline in sorted(tensors.items()):
        sort, _, name = key.partition("/")
        if sort == "model":
            yield {"unit": unit, "name": name, **outline}


def _outline(each: Mapping[str, Any]) -> dict[str, Any]:
    return {"shape": list(each["shape"]), "dtype": each["dtype"]}


@checkpoint.command()
@click.argument("folders", nargs=-1, required=True, type=_folder)
@_json
def verify(folders: tuple[Place, ...], as_json: bool) -> None:
    """Read every byte of the checkpoints FOLDERS, or in them, and name damaged files.

    Exit status 1 if there is one.
    """
    chosen = [(each, [each] if _is_one(each) else _inside(each)) for each in folders]
    if empty := [str(folder) for folder, inside in chosen if not inside]:
        raise CheckpointError(f"no checkpoint in {', '.join(empty)}\ngive the folder of one")
    problems = {str(one): _problems(one) for _, inside in chosen for one in inside}
    if as_json:
        print(json.dumps(problems, indent=1))
    else:
        for folder, found in problems.items():
            print("\n".join(found or [f"{folder}: every byte is what was written"]))
    sys.exit(1 if any(problems.values()) else 0)


def _problems(folder: Place) -> list[str]:
    """Return the problems of a checkpoint.

    Looks again if another save replaces it meanwhile.
    """
    from accel_core.checkpoint.manifest import manifest_if_any

    before = manifest_if_any(folder)
    found = _problems_now(folder)
    now = manifest_if_any(folder) if found else None
    return _problems(folder) if before and now and before.save_id != now.save_id else found


def _problems_now(folder: Place) -> list[str]:
    from accel_core.checkpoint.files import DataFile
    from accel_core.checkpoint.manifest import folder_of_files, read_manifest
    from accel_core.checkpoint.reader import CheckpointFiles
    from accel_core.distributed.progress import show_progress

    problems: list[str] = []
    files: list[DataFile] = []
    with _noting(problems):
        manifest = read_manifest(folder)
        home = folder_of_files(folder, manifest)
        for name, record in manifest.files.items():
            both = [home / f"{Path(name).stem}{suffix}" for suffix in (".json", ".safetensors")]
            if manifest.domains and not any(path.exists() for path in both):
                continue  # it is on another node's disk
            with _noting(problems):
                files.append(DataFile(home / name, record))
    total = sum(file.record.size for file in files)
    with show_progress(f"verifying {folder.name}", DataFile.measured(total)):
        for file in files:
            with _noting(problems):
                file.check(map(file.block, file.blocks))
    if not problems:
        with _noting(problems):
            CheckpointFiles.open(folder)
    return problems


@contextmanager
def _noting(problems: list[str]) -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        problems.append(_first_line(error))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


@checkpoint.command(context_settings=_FORWARDING)
@click.argument("folder", type=_folder)
@_target
@click.option("--format", "form", default="safetensors", show_default=True, help="Or torch, or a plugin's.")
@click.option("--unit", help="Whose weights; default: every unit's, each in a folder if there are several.")
@click.option("--max-shard-size", "limit", help="Of a file; default: 10GB.")
@click.option("--force", is_flag=True, help="Replace weights that are in TARGET.")
@_more
def export(
    folder: Place,
    target: Place,
    form: str,
    unit: str | None,
    limit: str | None,
    force: bool,
    more: tuple[str, ...],
) -> None:
    """Write the weights in the checkpoint FOLDER to the folder TARGET, whole.

    A --format that a plugin adds may have more options: --format NAME --help.
    """
    if form not in ("safetensors", "torch"):
        ours = {"--unit": unit, "--max-shard-size": limit}
        given = [word for option, value in ours.items() if value is not None for word in (option, value)]
        given += ["--force"] if force else []
        _hand_over(form, "export", folder, target, *given, *more)
        return
    if more:
        raise click.UsageError(f"No such option: {more[0]}")
    from accel_core.checkpoint import export as exporting

    safe, size = form == "safetensors", "10GB" if limit is None else limit
    for home in exporting.export(folder, target, unit, size, safe=safe, force=force):
        print(home)


@checkpoint.command("import", context_settings=_FORWARDING)
@click.argument("folder", type=_folder)
@_target
@click.option("--format", "form", required=True, help="What FOLDER is; plugins add formats.")
@_more
def import_(folder: Place, target: Place, form: str, more: tuple[str, ...]) -> None:
    """Write the checkpoint TARGET from FOLDER, which another library has saved.

    Runs no code found in FOLDER.
    """
    _hand_over(form, "import", folder, target, *more)


def _hand_over(form: str, *words: str | Place) -> None:
    """Call the command plugin `checkpoint-FORM`, which has `import` and `export`."""
    from accel_core.plugins.catalog import not_installed

    discovery, name = discover(), f"checkpoint-{form}"
    record = discovery.get(name)
    if record is None or record.card is None or record.status != "available":
        raise PluginError(record.reason if record else not_installed(name, "command", discovery), plugin=name)
    command: click.Command = load(record, record.card.implementation or "")
    command.main(list(map(str, words)), prog_name="accel checkpoint", standalone_mode=False)

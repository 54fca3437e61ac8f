"""List checkpoints, and verify every byte of them. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any, TypeVar

from accel_checkpoint_tools.text import age, size
from accel_core import (
    CheckpointError,
    DataFile,
    Manifest,
    Opened,
    Storage,
    commits,
    read_manifest,
    show_progress,
)

__all__ = ["described", "inside", "is_checkpoint", "parameters", "problems_of"]

T = TypeVar("T")
_PIECE_BYTES = 1 << 19


def is_checkpoint(place: Storage) -> bool:
    """Return True if the folder is a checkpoint, damaged or not."""
    return bool(commits(place))


def inside(folder: Storage) -> list[Storage]:
    """Return the checkpoints in a folder, and in its `checkpoints`: damaged ones too, unfinished ones not."""
    return [
        each.at(name)
        for each in (folder, folder.at("checkpoints"))
        for name, length in sorted(each.list().items())
        if length is None and not name.startswith(".") and is_checkpoint(each.at(name))
    ]


def described(place: Storage) -> dict[str, Any]:
    """Return what `list` shows of a checkpoint. Reads what describes its data, and no data."""
    row: dict[str, Any] = dict.fromkeys(("step", "age", "size", "ranks", "stack", "bytes", "metrics"))
    row |= {"name": place.name, "path": str(place), "time": "", "valid": "yes"}
    problems: list[str] = []
    with _noting(problems):
        manifest = read_manifest(place)
        about, count = manifest.members, sum(record.size for record in manifest.files.values())
        passed = datetime.now(timezone.utc) - datetime.fromisoformat(about["time"])
        row |= {"step": about["step"], "time": about["time"], "ranks": about["world"]["size"]}
        row |= {"age": age(passed.total_seconds()), "bytes": count, "size": size(count)}
        row |= {"metrics": about.get("metrics", {}), "stack": about["stack"]["summary"]}
        opened(place)
    return row | ({"valid": problems[0]} if problems else {})


def opened(place: Storage) -> Opened:
    """Return the opened checkpoint, for which no claim is made: one that is replaced is opened again."""

    def open_it(manifest: Manifest) -> Opened:
        return Opened.of(place, manifest, place.at(manifest.save_id))

    return _of_newest(place, open_it, lambda _: False)


def parameters(checkpoint: Opened) -> Iterator[dict[str, Any]]:
    """Yield unit, name, shape and dtype of each parameter and buffer."""
    tensors: dict[tuple[str, str], dict[str, Any]] = {}
    for rank, (data, _) in checkpoint.shares.items():
        try:
            for unit, key, outline, _ in checkpoint.described(rank, _outline):
                tensors[unit, key] = outline
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{data.home}/rank-{rank:05d}.json: this is not what a save writes: {error!r}\n"
                "restore this file, or install an accel-core that is as new as what wrote it"
            ) from error
    for (unit, key), outline in sorted(tensors.items()):
        sort, _, name = key.partition("/")
        if sort == "model":
            yield {"unit": unit, "name": name, **outline}


def _outline(each: Mapping[str, Any]) -> dict[str, Any]:
    return {"shape": list(each["shape"]), "dtype": each["dtype"]}


def problems_of(place: Storage) -> list[str]:
    """Return the problems of a checkpoint, of which every byte is read."""
    problems: list[str] = []
    with _noting(problems):
        return _of_newest(place, lambda manifest: _problems(place, manifest), bool)
    return problems


def _of_newest(place: Storage, look: Callable[[Manifest], T], is_bad: Callable[[T], bool]) -> T:
    """Return what `look` gives of the newest save; again, if it is bad and another save came meanwhile."""
    while True:
        manifest = read_manifest(place)
        try:
            if not is_bad(found := look(manifest)) or read_manifest(place).save_id == manifest.save_id:
                return found
        except CheckpointError:
            if read_manifest(place).save_id == manifest.save_id:
                raise


def _problems(place: Storage, manifest: Manifest) -> list[str]:
    home, problems = place.at(manifest.save_id), list[str]()
    entries, files = home.list(), list[DataFile]()
    for name, record in manifest.files.items():
        stem, file = name.partition(".")[0], DataFile(home, name, record)
        if manifest.domains and not {f"{stem}.json", f"{stem}.safetensors"} & entries.keys():
            continue  # it is on another node's disk
        if entries.get(name) == record.size:
            files.append(file)
        else:
            there = f"it is not a file of {record.size} bytes" if name in entries else "it is not there"
            problems.append(f"{file} is damaged: {there}")
    total, piece = sum(file.record.size for file in files), memoryview(bytearray(_PIECE_BYTES))
    with show_progress(f"verifying {place.name}", lambda: (sum(each.meter.count for each in files), total)):
        for file in files:
            with _noting(problems):
                file.check([file.block(number, piece) for number in file.blocks])
    if not problems:
        with _noting(problems):
            Opened.of(place, manifest, home)
    return problems


@contextmanager
def _noting(problems: list[str]) -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        problems.append(str(error).partition("\n")[0])

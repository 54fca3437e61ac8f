"""Files of a model's whole weights, in the layout of `from_pretrained`."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from accel_core.checkpoint.file import not_written, write_whole
from accel_core.checkpoint.places import local_path, path_text, scheme_of, storage_at
from accel_core.distributed.progress import show_progress
from accel_core.errors import CheckpointError, ConfigError
from accel_core.storage.codec import require_plain
from accel_core.storage.commit import new_save_id, prune
from accel_core.storage.disk import Disk

if TYPE_CHECKING:
    from accel_core.storage.protocols import Storage

Names = list[str]
"""All names of one weight, in the model's order; a tied weight has several names."""


def bytes_in(size: int | str) -> int:
    """Return a size in bytes, from a number or from text such as "10GB" or "500MiB"."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?)(i?)B?", str(size), re.IGNORECASE)
    number, unit, binary = found.groups() if found else ("0", "", "")
    limit = int(float(number) * (1024 if binary else 1000) ** " KMGT".index(unit.upper() or " "))
    if not limit:
        raise ConfigError(
            f"max_shard_size={size!r} is not a size\ngive bytes, or text such as '10GB' or '500MiB'"
        )
    return limit


_ANY: Final = re.compile(r"(model|pytorch_model)(-\d{5}-of-\d{5})?(\.safetensors|\.bin)(\.index\.json)?")


def write_weights(
    folder: str | os.PathLike[str],
    weights: Iterable[tuple[Names, Tensor]],
    extra: dict[str, Any],
    limit: int | str,
    *,
    safe: bool,
    replace: bool = False,
) -> None:
    """Write weights in the layout of `from_pretrained`.

    Needs memory for the weights of one file. Files of an earlier save stay until all weights are written. In
    a store, weights are never replaced: a reader could mix files of both saves.

    Args:
        folder: a local folder, or the URL of a store.
        weights: (all names, tensor) of each weight.
        extra: further entries of the state dict, by key.
        limit: most bytes per file.
        safe: write safetensors, instead of by `torch.save`.
        replace: remove weights in the other format too.

    Raises:
        CheckpointError: a weight or the folder cannot be written, the store has weights already, or the
            folder has safetensors that readers would take instead of the new files.
    """
    if scheme_of(path_text(folder)):
        with tempfile.TemporaryDirectory(prefix="accel-weights-") as beside:
            where = storage_at(folder)
            _refuse_there(where)
            write_weights(beside, weights, extra, limit, safe=safe)
            _send(Path(beside), where)
        return
    home, size = local_path(folder), bytes_in(limit)
    if not (safe or replace):
        _refuse_unread(home)
    try:
        with show_progress(f"writing {home}"), _staging_folder(home) as beside_it:
            written = _write_parts(beside_it, weights, extra, size, safe=safe)
            _publish(home, beside_it, written, safe=safe, replace=replace)
    except OSError as error:
        raise not_written(home, error) from error


@contextmanager
def _staging_folder(folder: Path) -> Iterator[Path]:
    """Give a temporary folder to write into, and remove temporary folders that killed writers have left."""
    disk = Disk(folder.absolute())
    prune(disk, 0)
    beside = disk.at(new_save_id())
    with beside.claim():
        try:
            yield beside.path
        finally:
            beside.remove([*beside.list()])


def weights_in(folder: Storage) -> list[str]:
    """Return the names of all files of weights in a folder, in any format and from any writer."""
    try:
        return sorted(filter(_ANY.fullmatch, folder.list()))
    except OSError as error:
        raise not_written(folder, error) from error


def _refuse_there(folder: Storage) -> None:
    if there := weights_in(folder):
        raise CheckpointError(
            f"{folder}/{there[0]} exists, and was left as it is\nwrite to another folder, or remove it",
            path=str(folder),
        )


def _send(source: Path, folder: Storage) -> None:
    """Send all files, the index last; if a file cannot be sent, remove the others."""
    names = sorted((path.name for path in source.iterdir()), key=lambda name: name.endswith(".json"))
    try:
        for name in names:
            with folder.writer(name) as target, (source / name).open("rb") as file:
                shutil.copyfileobj(file, target, 1 << 22)
    except OSError as error:
        with suppress(OSError):
            folder.remove(names)
        raise not_written(folder, error) from error


def _refuse_unread(folder: Path) -> None:
    preferred = folder / "model.safetensors"
    if preferred.exists() or Path(f"{preferred}.index.json").exists():
        raise CheckpointError(
            f"{folder} has weights as safetensors, which readers take instead of pytorch_model.bin\n"
            "save to another folder, or remove them",
            path=str(folder),
        )


def _write_parts(
    beside: Path, weights: Iterable[tuple[Names, Tensor]], extra: Mapping[str, Any], limit: int, *, safe: bool
) -> list[tuple[Names, int]]:
    """Write files "0", "1", ... one at a time; return (names, bytes) of each file."""
    written: list[tuple[Names, int]] = []
    told = {name: value for name, value in extra.items() if isinstance(value, Tensor)}
    part, size = {name: value for name, value in extra.items() if name not in told}, 0
    storages: set[int] = set()

    def finish() -> None:
        write_whole(part, beside / str(len(written)), safe_serialization=safe)
        written.append((list(part), size))
        part.clear()
        storages.clear()

    for names, lazy in chain(weights, (([name], tensor) for name, tensor in told.items())):
        require_plain(names[0], lazy)
        if size and size + lazy.nbytes > limit:
            finish()
            size = 0
        size += lazy.nbytes
        part.update(
            dict.fromkeys(names[:1] if safe else names, _writable(names[0], lazy, storages, safe=safe))
        )
    finish()
    return written


def _writable(name: str, tensor: Tensor, storages: set[int], *, safe: bool) -> Tensor:
    """Return the tensor in memory of its own, and add the address of the memory to `storages`.

    A tensor that wraps others is returned as it is; with `safe` it raises CheckpointError.
    """
    if is_traceable_wrapper_subclass(tensor):
        if safe:
            raise CheckpointError(
                f"{name} is a {type(tensor).__name__}, which wraps other tensors, and safetensors holds plain"
                " ones only\nsave with safe_serialization=False"
            )
        return tensor
    tensor = tensor.resolve_conj().resolve_neg()  # a file holds memory as it is
    # torch.save writes the whole storage of a view; safetensors refuses tensors that share a storage.
    storage = tensor.untyped_storage()
    if storage.nbytes() != tensor.nbytes or storage.data_ptr() in storages or not tensor.is_contiguous():
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    storages.add(storage.data_ptr())
    return tensor


def _publish(
    folder: Path, beside: Path, written: Sequence[tuple[Names, int]], *, safe: bool, replace: bool
) -> None:
    """Rename the files so that a reader finds the earlier save, this save, or an error, never a mixture."""
    stem, suffix = ("model", ".safetensors") if safe else ("pytorch_model", ".bin")
    count, index = len(written), f"{stem}{suffix}.index.json"
    files = [f"{stem}-{number + 1:05d}-of-{count:05d}{suffix}" for number in range(count)]
    if count == 1:
        files = [f"{stem}{suffix}"]
    elif (folder / files[0]).exists():
        (folder / index).unlink(missing_ok=True)  # it would name files of two saves
    ours = (
        _ANY if replace else re.compile(rf"{stem}(-\d{{5}}-of-\d{{5}})?{re.escape(suffix)}(\.index\.json)?")
    )
    for number, file in enumerate(files):
        (beside / str(number)).replace(folder / file)
    if count > 1:
        homes = {name: file for file, (names, _) in zip(files, written, strict=True) for name in names}
        total = sum(size for _, size in written)
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": homes}, indent=2)
        with Disk(beside).writer(index) as listing:
            listing.write(text.encode())
        (beside / index).replace(folder / index)
        files.append(index)
    for old in list(folder.iterdir()):
        if ours.fullmatch(old.name) and old.name not in files:
            old.unlink(missing_ok=True)
    Disk(folder.absolute()).sync()

"""A model's whole weights by its own names: a stream, a dict, or files."""

from __future__ import annotations

import json
import os
import re
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from accel_core.checkpoint.agree import run_on_all_ranks
from accel_core.checkpoint.codec import require_plain
from accel_core.checkpoint.commit import workshop
from accel_core.checkpoint.file import not_written, write_whole
from accel_core.checkpoint.files import sync_folder, write_file
from accel_core.checkpoint.module_state import module_state, state_dict_outline
from accel_core.checkpoint.stored import Place, StoredPath, place
from accel_core.checkpoint.stored_commit import send, spool
from accel_core.contract.suggest import did_you_mean
from accel_core.distributed.progress import show_progress
from accel_core.distributed.watch import assemble
from accel_core.errors import AccelError, CheckpointError, ConfigError

if TYPE_CHECKING:
    from accel_core.contract.run import Run
    from accel_core.contract.unit import Unit

__all__ = [
    "bytes_in",
    "full_parameters",
    "save_model",
    "state_dict",
    "weights_in",
    "weights_of",
    "write_weights",
]

Names = list[str]
"""All names of one weight, in the model's order; a tied weight has several."""


def weights_of(
    run: Run, model: nn.Module, dtype: torch.dtype | None = None, to: torch.device | None = None
) -> Iterator[tuple[Names, Tensor]]:
    """Each parameter and persistent buffer of the model, whole, one after the other.

    Collective.

    Names are canonical, without the number that a unit of several models puts before them. A model that
    was not prepared is read as it is.
    """
    unit, number = _home(run, model)
    names: dict[str, Names] = {}
    module, prefix = unit.models[number], unit.qualify(number, "")
    for tensors in (module.named_parameters, module.named_buffers):
        for name, _ in tensors(remove_duplicate=False):
            canonical = unit.qualify(number, name)
            owner = unit.aliases.get(canonical, canonical)
            names.setdefault(owner, []).append(canonical.removeprefix(prefix))
    told = module_state(unit, number)
    for canonical, tensor in unit.hooks.iter_weights(unit, dtype, to):
        if canonical in names or canonical.startswith(prefix):  # the others: parts that only other ranks have
            keys = told.keys_of(names.get(canonical, [canonical.removeprefix(prefix)]))
            if keys:
                yield keys, tensor


def full_parameters(
    run: Run, model: nn.Module, names: Iterable[str] | None, *, writeback: bool
) -> AbstractContextManager[Any]:
    """Make the model's parameters of these names whole in a context. Collective."""
    unit, number = _home(run, model)
    module = unit.models[number]
    prefix, all_names = unit.qualify(number, ""), module.named_parameters(remove_duplicate=False)
    known = [unit.qualify(number, name).removeprefix(prefix) for name, _ in all_names]
    wanted = known if names is None else list(names)
    if unknown := sorted({*wanted}.difference(known)):
        raise AccelError(
            f"full_parameters: the {type(module).__name__} has no parameter {unknown[0]!r}"
            f"{did_you_mean(unknown[0], known)}"
            "\nuse the names that named_parameters() of your own model gives"
        )
    canonical = [prefix + name for name in wanted]
    once = list(dict.fromkeys(unit.aliases.get(name, name) for name in canonical))
    context: AbstractContextManager[Any] = unit.hooks.full_parameters(unit, once, writeback)
    return context


def state_dict(run: Run, model: nn.Module) -> dict[str, Any]:
    """Return the model's state dict as if whole and unwrapped. Collective.

    Parts that only other ranks hold come last.
    """
    found: dict[str, Any] = {name: tensor for names, tensor in weights_of(run, model) for name in names}
    found |= _extra_state(run, model)
    told: Any = state_dict_outline(*_home(run, model))
    whole = OrderedDict((key, found.pop(key)) for key in told if key in found)
    whole.update(found)
    if hasattr(told, "_metadata"):  # versions of modules, for `load_state_dict`
        whole._metadata = told._metadata  # type: ignore[attr-defined]
    return whole


def save_model(
    run: Run, model: nn.Module, directory: str | os.PathLike[str], *, limit: int | str, safe: bool, here: bool
) -> None:
    """Write the model's weights into `directory`.

    Collective; ranks with `here` write.

    limit: bytes of a file, as a number or as in "10GB". safe: as safetensors, else by `torch.save`.

    Raises:
        CheckpointError: a rank could not write them; raised on all.
    """
    folder, size, weights = place(directory), bytes_in(limit), weights_of(run, model)

    def write() -> None:
        try:
            if here:
                write_weights(folder, weights, _extra_state(run, model), size, safe=safe)
        finally:
            # Whole weights are made by all ranks together: whatever happened here, go on to the end.
            deque(weights, maxlen=0)

    assemble(run, "save_model")
    run_on_all_ranks(run.collectives("control"), "save_model: write", write)


def bytes_in(size: int | str) -> int:
    """Return a size in bytes, given as a number or as in "10GB" or "500MiB"."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?)(i?)B?", str(size), re.IGNORECASE)
    if found is None:
        raise ConfigError(
            f"max_shard_size={size!r} is not a size\ngive bytes, or text such as '10GB' or '500MiB'"
        )
    number, unit, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index(unit.upper() or " "))


def write_weights(
    folder: Place,
    weights: Iterable[tuple[Names, Tensor]],
    extra: dict[str, Any],
    limit: int,
    *,
    safe: bool,
    total: int = 0,
) -> None:
    """Write weights in the layout of `from_pretrained`, `limit` bytes a file at most.

    Needs memory for one file's. What was there before stays until all of it is written. total: bytes of all,
    if they are known. In a store, weights that are there are not replaced: a reader could mix the two.
    """
    if isinstance(folder, StoredPath):
        if there := weights_in(folder):
            raise CheckpointError(
                f"{there[0]} exists, and was left as it is\nwrite to another folder, or remove it",
                path=str(folder),
            )
        with spool(total) as beside:
            write_weights(beside, weights, extra, limit, safe=safe, total=total)
            names = sorted(
                (path.name for path in beside.iterdir()), key=lambda name: name.endswith(".index.json")
            )
            try:
                send(beside, names, folder)
            except OSError as error:
                with suppress(OSError):
                    folder.remove(names)
                raise not_written(folder, error) from error
        return
    _refuse(folder, extra, safe=safe)
    done = 0

    def counted() -> Iterator[tuple[Names, Tensor]]:
        nonlocal done
        for names, tensor in weights:
            yield names, tensor
            done += tensor.nbytes

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with show_progress(f"writing {folder}", lambda: (done, total)), workshop(folder) as beside:
            written = _write_parts(beside, counted(), extra, limit, safe=safe)
            with _alone(folder):
                _publish(folder, beside, written, safe=safe)
    except OSError as error:
        raise not_written(folder, error) from error


def weights_in(folder: Place) -> list[Place]:
    """Return the files of weights in a folder, whatever wrote them."""
    names = re.compile(r"(model|pytorch_model)(-\d{5}-of-\d{5})?(\.safetensors|\.bin)(\.index\.json)?")
    entries: Iterable[Place] = folder.iterdir() if folder.is_dir() else ()
    return sorted((path for path in entries if names.fullmatch(path.name)), key=str)


def _home(run: Run, model: nn.Module) -> tuple[Unit, int]:
    """Return the model's unit and its number there.

    A unit of its own if it was not prepared.
    """
    run.require_alive()
    unit = run.unit_of_model(model)
    if unit is None:
        unit = run.make_unit("unprepared", "single")
        unit.add_models([model], [model])
        unit.wrapped.append(model)
    unit.drop_cut_ties()
    pairs = zip(unit.models, unit.wrapped, strict=True)
    return unit, next(number for number, pair in enumerate(pairs) if model in pair)


def _extra_state(run: Run, model: nn.Module) -> dict[str, Any]:
    """State of modules beside parameters and buffers, by the names of `state_dict`."""
    return module_state(*_home(run, model)).extra


def _refuse(folder: Path, extra: Mapping[str, Any], *, safe: bool) -> None:
    odd = [name for name, value in extra.items() if not isinstance(value, Tensor)]
    if safe and odd:
        raise CheckpointError(
            f"{odd[0]} is not a tensor, and safetensors holds nothing else\n"
            "save with safe_serialization=False"
        )
    preferred = folder / "model.safetensors"
    if not safe and (preferred.exists() or Path(f"{preferred}.index.json").exists()):
        raise CheckpointError(
            f"{folder} has weights as safetensors, which readers take instead of pytorch_model.bin\n"
            "save to another folder, or remove them",
            path=str(folder),
        )


def _write_parts(
    beside: Path, weights: Iterable[tuple[Names, Tensor]], extra: Mapping[str, Any], limit: int, *, safe: bool
) -> list[tuple[Names, int]]:
    """Write files "0", "1", ... one at a time. Returns the names and bytes in each."""
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
    """Return the tensor in memory of its own, and note that memory in `storages`.

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
    # A file would hold the whole storage of a part of it, and is refused if two share one.
    storage = tensor.untyped_storage()
    if storage.nbytes() != tensor.nbytes or storage.data_ptr() in storages or not tensor.is_contiguous():
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    storages.add(storage.data_ptr())
    return tensor


_handles: Final[dict[tuple[Path, int], int]] = {}
"""Folders that threads of this process save into.

Ctrl-C within the end of a save leaves its handle, maybe locked. The thread's next save goes on with that
handle: it would wait for itself with another.
"""


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait for other saves into the folder, as far as its file system has locks."""
    try:
        import fcntl
    except ImportError:  # Windows; `_publish` compares what is there afterwards
        yield
        return
    key = folder, threading.get_ident()
    if key not in _handles:
        _handles[key] = os.open(folder, os.O_RDONLY)
    handle = _handles[key]
    try:
        with suppress(OSError):  # some network file systems lock no folders
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        if _handles.get(key) == handle:
            with suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_UN)  # closing is not enough: a forked process has it too
            del _handles[key]
            os.close(handle)


def _publish(folder: Path, beside: Path, written: Sequence[tuple[Names, int]], *, safe: bool) -> None:
    """Name the files so that a reader finds the old save, this one, or an error."""
    stem, suffix = ("model", ".safetensors") if safe else ("pytorch_model", ".bin")
    count, index = len(written), f"{stem}{suffix}.index.json"
    files = [f"{stem}-{number + 1:05d}-of-{count:05d}{suffix}" for number in range(count)]
    if count == 1:
        files = [f"{stem}{suffix}"]
    elif (folder / files[0]).exists():
        (folder / index).unlink(missing_ok=True)  # it would name files of two saves
    ours = re.compile(rf"{stem}(-\d{{5}}-of-\d{{5}})?{re.escape(suffix)}(\.index\.json)?")
    made = {file: (beside / str(number)).stat() for number, file in enumerate(files)}
    for number, file in enumerate(files):
        (beside / str(number)).replace(folder / file)
    if count > 1:
        homes = {name: file for file, (names, _) in zip(files, written, strict=True) for name in names}
        total = sum(size for _, size in written)
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": homes}, indent=2)
        write_file(beside / index, [text.encode()])
        made[index] = (beside / index).stat()
        (beside / index).replace(folder / index)
    for old in list(folder.iterdir()):
        if ours.fullmatch(old.name) and old.name not in made:
            old.unlink(missing_ok=True)
    there = {path.name: path.stat() for path in folder.iterdir() if ours.fullmatch(path.name)}
    if there.keys() != made.keys() or not all(os.path.samestat(there[file], made[file]) for file in made):
        raise CheckpointError(
            f"{folder}: another save wrote into this folder at the same time, and its files are mixed with"
            " those of this one\nsave again, and give each of them a folder of its own",
            path=str(folder),
        )
    sync_folder(folder)

"""The tensors of a checkpoint as a tree of their names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from accel_core import CheckpointFiles
from accel_inspect.state import ties_of
from accel_inspect.tensors import Key, StoredTensor, tensors_of

__all__ = ["as_rows", "lines"]

_SIZES: Final = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def as_rows(opened: CheckpointFiles) -> dict[str, Any]:
    """Return every tensor, and the files and boxes that hold it, for JSON."""
    return {
        "folder": str(opened.folder),
        "absent": opened.absent,
        "ties": ties_of(opened),
        "tensors": [_row(key, tensor) for key, tensor in tensors_of(opened).items()],
    }


def _row(key: Key, tensor: StoredTensor) -> dict[str, Any]:
    boxes = [
        {"file": box.source.path.name, "offset": box.part[0], "shape": box.part[1], "start": box.start}
        for box in tensor.boxes
    ]
    about = {"unit": key[0], "key": key[1], "kind": tensor.kind}
    numbers = {"shape": tensor.shape, "dtype": tensor.dtype, "bytes": tensor.nbytes}
    return {**about, **numbers, "boxes": boxes}


def lines(opened: CheckpointFiles) -> Iterator[str]:
    """Yield the tree, a tensor per line, then ties and totals."""
    tensors = tensors_of(opened)
    tree: dict[tuple[str, bool], Any] = {}  # by name, and whether it is a tensor's: both may have it
    for key, tensor in tensors.items():
        node = tree
        *path, last = _path(key)
        for word in path:
            node = node.setdefault((word, False), {})
        node[last, True] = tensor
    rows = [*_rows(tree, 0)]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(4)]
    for name, dtype, shape, size, files in rows:
        cells = (
            f"{name:<{widths[0]}}  {dtype:<{widths[1]}}  {shape:<{widths[2]}}  {size:>{widths[3]}}  {files}"
        )
        yield cells.rstrip()
    for unit, groups in ties_of(opened).items():
        yield from (f"tied in {unit}: {' = '.join(group)}" for group in groups)
    total = sum(tensor.nbytes for tensor in tensors.values())
    yield f"{len(tensors)} tensors, {_size(total)}"
    if opened.absent:
        yield f"the files of {opened.absent} are not in this folder"


def _path(key: Key) -> list[str]:
    unit, (sort, _, rest) = key[0] or "(the run)", key[1].partition("/")
    if not key[0]:
        return [unit, key[1]]
    owner, slash, part = rest.rpartition("/") if sort != "model" else (rest, "", "")
    return [unit, sort, *owner.split("."), *([part] if slash else [])]


def _rows(tree: Mapping[tuple[str, bool], Any], depth: int) -> Iterator[tuple[str, str, str, str, str]]:
    for (word, _), node in tree.items():
        name = f"{'  ' * depth}{word}"
        if isinstance(node, StoredTensor):
            files = list(dict.fromkeys(box.source.path.name for box in node.boxes))
            place = files[0] if len(files) == 1 else f"{len(files)} files: {files[0]}, ..."
            yield name, node.dtype, str(list(node.shape)), _size(node.nbytes), place
        else:
            yield name, "", "", "", ""
            yield from _rows(node, depth + 1)


def _size(count: int) -> str:
    unit, scale = next((each for each in _SIZES if count >= each[1]), ("B", 1))
    return f"{count / scale:.3g} {unit}"

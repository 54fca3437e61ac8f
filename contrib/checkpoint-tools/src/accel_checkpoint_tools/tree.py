"""The tensors of a checkpoint as a tree of their names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from accel_checkpoint_tools.sections import ties_of
from accel_checkpoint_tools.text import in_order, size, table
from accel_core import Checkpoint, Stored

__all__ = ["as_rows", "lines"]

Key = tuple[str, str]


def as_rows(opened: Checkpoint) -> dict[str, Any]:
    """Return every tensor, and the files and boxes that hold it, for JSON."""
    return {
        "folder": str(opened.place),
        "absent": opened.absent,
        "ties": ties_of(opened),
        "tensors": [_row(key, tensor) for key, tensor in _ordered(opened).items()],
    }


def _row(key: Key, tensor: Stored) -> dict[str, Any]:
    boxes = [
        {"file": file.name, "offset": box.offset, "shape": box.shape, "start": start}
        for box, (file, start) in tensor.boxes.items()
    ]
    about = {"unit": key[0], "key": key[1], "kind": tensor.kind}
    numbers = {"shape": tensor.shape, "dtype": tensor.dtype, "bytes": tensor.nbytes}
    return {**about, **numbers, "boxes": boxes}


def lines(opened: Checkpoint) -> Iterator[str]:
    """Yield the tree, a tensor per line, then ties and totals."""
    tensors = _ordered(opened)
    tree: dict[tuple[str, bool], Any] = {}  # by name, and whether it is a tensor's: both may have it
    for key, tensor in tensors.items():
        node = tree
        *path, last = _path(key)
        for word in path:
            node = node.setdefault((word, False), {})
        node[last, True] = tensor
    yield from table([*_rows(tree, 0)])
    for unit, groups in ties_of(opened).items():
        yield from (f"tied in {unit}: {' = '.join(group)}" for group in groups)
    total = sum(tensor.nbytes for tensor in tensors.values())
    yield f"{len(tensors)} tensors, {size(total)}"
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
        if isinstance(node, Stored):
            files = list(dict.fromkeys(file.name for file, _ in node.boxes.values()))
            place = files[0] if len(files) == 1 else f"{len(files)} files: {files[0]}, ..."
            yield name, node.dtype, str(list(node.shape)), size(node.nbytes), place
        else:
            yield name, "", "", "", ""
            yield from _rows(node, depth + 1)


def _ordered(opened: Checkpoint) -> dict[Key, Stored]:
    """Return the tensors in the order of their names; the run's own come last."""
    in_names = sorted(opened.tensors, key=lambda key: (not key[0], in_order("/".join(key))))
    return {key: opened.tensors[key] for key in in_names}

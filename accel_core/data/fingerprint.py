"""Tell datasets of one kind apart that ranks read shares of, and batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final
from zlib import crc32

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, SubsetRandomSampler

from accel_core.distributed.nested import walk
from accel_core.distributed.tensor_bytes import bytes_of

COMPARED: Final = 1 << 16
"""Elements of a tensor, and characters of a text, that are compared."""


def fingerprint(dataset: Any) -> str:
    """Return a map-style dataset's length, and a checksum of its indices.

    Those are of the parts that it takes of other datasets. "" where its own code gives no length, or no
    indices that can be compared.
    """
    try:
        words = f"{len(dataset)} samples"
        checksum = _checksum(_indices_in(dataset))
    except Exception:  # the dataset's own code
        return ""
    return words if checksum is None else f"{words} chosen by indices {checksum:08x}"


def choice(dataset: Any, sampler: Any) -> str:
    """Return words that tell an epoch's samples from others of the same number.

    They are a checksum of the indices of torch's own parts of datasets, and of its sampler of a part; ""
    without any. Other classes may draw theirs anew for each epoch, or note in them what was read.
    """
    chosen = _bytes(sampler.indices) if type(sampler) is SubsetRandomSampler else ()
    try:
        checksum = _checksum(chain(_indices_in(dataset, torchs_only=True), chosen))
    except Exception:  # the dataset's own code
        return ""
    return "" if checksum is None else f" among indices {checksum:08x}"


def content(batch: Any) -> str:
    """Return a checksum of a batch's numbers, or of its text where it has none.

    "" where it has neither, or only numbers that are not in host memory.
    """
    numbers: list[bytes] = []
    text: list[bytes] = []
    for _, leaf in walk(batch):
        if isinstance(leaf, str | bytes):
            text.append(repr(leaf[:COMPARED]).encode())
        elif type(leaf) is Tensor and leaf.is_cpu and _is_dense(leaf):
            numbers.append(bytes(bytes_of(leaf.detach().reshape(-1)[:COMPARED])))
        elif isinstance(leaf, np.ndarray | np.generic) and not leaf.dtype.hasobject:
            numbers.append(leaf.reshape(-1)[:COMPARED].tobytes())
        elif isinstance(leaf, int | float):
            numbers.append(repr(leaf).encode())
    checksum = _checksum(numbers or text)
    return "" if checksum is None else f"{checksum:08x}"


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized)


def _checksum(parts: Iterable[bytes]) -> int | None:
    checksum = None
    for part in parts:
        checksum = crc32(part, checksum or 0)
    return checksum


def _indices_in(dataset: Any, *, torchs_only: bool = False) -> Iterator[bytes]:
    """Yield, as bytes, the indices of each part of another dataset (a Subset).

    Parts of random splits are equally long. They may lie in each other, or in datasets that join them.
    """
    inner = getattr(dataset, "dataset", None)
    is_torchs = type(dataset).__module__.startswith("torch.")
    if inner is not None and hasattr(dataset, "indices") and (is_torchs or not torchs_only):
        yield from _bytes(dataset.indices)
    joined = getattr(dataset, "datasets", None)
    joined = joined.values() if isinstance(joined, Mapping) else joined
    for each in (inner, *(joined if isinstance(joined, Sequence) else ())):
        if isinstance(each, Dataset):
            yield from _indices_in(each, torchs_only=torchs_only)


def _bytes(indices: Any) -> Iterator[bytes]:
    chosen = np.asarray(indices)
    if not chosen.dtype.hasobject:
        yield (chosen.astype(np.int64) if chosen.dtype.kind in "iu" else chosen).tobytes()

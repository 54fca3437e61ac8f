"""Fingerprints of datasets, to check that all ranks read shares of the same data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from zlib import crc32

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from accel_core.distributed.nested import recursively_apply


def fingerprint(dataset: Any) -> str:
    """Return a map-style dataset's length, with a checksum of the indices that it takes of other datasets.

    Returns the length alone if no dataset inside has indices, and "" if the dataset's own code raises.
    """
    checksum = None
    try:
        words = f"{len(dataset)} samples"
        for part in _indices_in(dataset):
            checksum = crc32(part, checksum or 0)
    except Exception:  # the dataset's own code
        return ""
    return words if checksum is None else f"{words} chosen by indices {checksum:08x}"


def fingerprint_of_batch(batch: Any) -> int:
    """Return a checksum of a batch's numbers and text."""
    return crc32(repr(recursively_apply(Tensor.tolist, batch)).encode()) if batch else 0


def _indices_in(dataset: Any) -> Iterator[bytes]:
    """Yield, as bytes, the indices of each Subset inside a dataset, or inside datasets that it joins.

    Parts of a random split have equal lengths: only their indices tell them apart.
    """
    inner = getattr(dataset, "dataset", None)
    if inner is not None and hasattr(dataset, "indices"):
        indices = np.asarray(dataset.indices)
        if not indices.dtype.hasobject:
            yield (indices.astype(np.int64) if indices.dtype.kind in "iu" else indices).tobytes()
    joined = getattr(dataset, "datasets", None)
    joined = joined.values() if isinstance(joined, Mapping) else joined
    for each in (inner, *(joined if isinstance(joined, Sequence) else ())):
        if isinstance(each, Dataset):
            yield from _indices_in(each)

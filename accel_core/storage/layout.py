"""The layout of a rank's data file, reused between saves as long as no leaf changes."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

import torch
from attrs import define, field
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from accel_core.storage.files import as_json, lay_out
from accel_core.storage.tensor_bytes import as_bytes, bytes_of, can_pin, copyable, name_of

if TYPE_CHECKING:
    from accel_core.storage.leaves import Box, Declared, Key, Leaf

Leaves = Mapping["Key", "Leaf"]
SMALL_BYTES: Final = 1 << 16
"""Largest tensor in bytes that is joined with others into one write."""
PIECE_BYTES: Final = 64 << 20
"""Bytes copied at once.

A synchronous save pins two pieces of this size, and no more memory. torch pins only powers of two.
"""
_TOGETHER: Final = 256
"""Largest number of small tensors in one write."""


@define(eq=False)
class Layout:
    """The position of each box that this rank writes in its data file."""

    name: str
    """Nonce of the plan, the same on all ranks."""
    declared: Mapping[Key, Declared]
    """This rank's leaves when the plan was made."""
    head: bytes
    """Start of the data file: the safetensors header."""
    index: bytes
    """Members of the rank's JSON file that describe the tensors."""
    size: int
    """Bytes of all tensors."""
    keys: list[Key]
    """Key of the leaf of each box, in the order of the file."""
    _shards: Sequence[int]
    """Number of each box in its leaf."""
    _pieces: list[slice]
    """Boxes that are copied and written together, as each write and each view costs time."""
    _buffer: Tensor | None = field(default=None, init=False)
    _rooms: list[Tensor] = field(factory=list, init=False)
    """View of the buffer for each piece."""
    _pinned: list[Tensor] = field(factory=list, init=False)
    """Pinned host buffer for tensors on an accelerator, in pieces."""

    @classmethod
    def of(
        cls,
        name: str,
        declared: Mapping[Key, Declared],
        writes: Mapping[Key, list[Box]],
        leaves: Leaves,
    ) -> Layout:
        """Return the layout of the boxes that the plan assigns to this rank."""
        parts = [
            (key, number)
            for key, wanted in writes.items()
            for number, box in enumerate(declared[key].boxes)
            if box in wanted
        ]
        # Widest dtype first, to align each tensor to its item size; then by device, to copy in groups.
        of = {(key, number): leaves[key].shards[number][1] for key, number in parts}
        parts.sort(key=lambda part: (-declared[part[0]].dtypes[part[1]].itemsize, of[part].device.type))
        tensors = [of[part] for part in parts]
        names = [_name(key, declared[key], number) for key, number in parts]
        head, starts = lay_out(zip(names, tensors, strict=True))
        size, placed = sum(tensor.nbytes for tensor in tensors), zip(parts, starts, strict=True)
        index = _index((key, declared[key], number, start) for (key, number), start in placed)
        keys, shards = [key for key, _ in parts], array("I", [number for _, number in parts])
        pieces = list(_pieces(tensors))
        return cls(name, declared, head, index, size, keys, shards, pieces)

    def tensors(self, leaves: Leaves) -> list[Tensor]:
        """Return this rank's tensors, in the order of the file."""
        boxes = zip(self.keys, self._shards, strict=True)
        return copyable([leaves[key].shards[number][1] for key, number in boxes])

    def read(self, leaves: Leaves) -> Iterator[memoryview]:
        """Return the data file's body, read from the tensors, which must not change meanwhile.

        Each part is valid until the next part is requested.
        """
        joined, device = self._joined(leaves)
        return map(bytes_of, joined if device is None else staged(joined, device))

    @torch.no_grad()
    def stage(self, leaves: Leaves) -> list[memoryview]:
        """Return a copy of the data file's body, in memory that the next save overwrites."""
        joined, device = self._joined(leaves)
        if device is not None:
            return [part.numpy().data for part in staged(joined, device, self._pinned)]
        if self._buffer is None:
            tensors = self.tensors(leaves)
            with torch.inference_mode(False):  # later saves may write outside inference mode
                buffer = torch.empty(self.size, dtype=torch.uint8, device="cpu")
                self._rooms = _rooms(buffer, [tensors[piece] for piece in self._pieces])
            self._buffer = buffer  # last: Ctrl-C may come before the views exist
        for room, piece in zip(self._rooms, joined, strict=True):
            room.copy_(piece)
        return [self._buffer.numpy().data]

    def _joined(self, leaves: Leaves) -> tuple[Iterator[Tensor], torch.device | None]:
        """Return the tensors, small tensors joined, and the device to stage from."""
        tensors = self.tensors(leaves)
        devices = {tensor.device for tensor in tensors}
        return _joined(tensors, self._pieces, mixed=len(devices) > 1), staging_device(devices)


def _joined(tensors: Sequence[Tensor], pieces: Iterable[slice], *, mixed: bool = False) -> Iterator[Tensor]:
    """Yield each piece of the tensors as one tensor, valid until the next piece is requested.

    `mixed` says that the tensors are on several devices; only pieces on several devices are moved to the CPU.
    """
    for piece in pieces:
        several = tensors[piece]
        if mixed and len({tensor.device for tensor in several}) > 1:
            several = [tensor.cpu() for tensor in several]
        yield several[0] if len(several) == 1 else _flatten_dense_tensors(several)


def _rooms(buffer: Tensor, pieces: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return one view of the buffer for each piece, in order."""
    parts = buffer.split([sum(tensor.nbytes for tensor in piece) for piece in pieces])
    return [
        part.view(piece[0].dtype).view(piece[0].shape if len(piece) == 1 else -1)
        for part, piece in zip(parts, pieces, strict=True)
    ]


def _pieces(tensors: Sequence[Tensor]) -> Iterator[slice]:
    """Yield slices of tensors to write together: small tensors of one dtype; other tensors are alone."""
    start = 0
    for (dtype, small, _), group in groupby(
        tensors, lambda tensor: (tensor.dtype, tensor.nbytes <= SMALL_BYTES, tensor.device)
    ):
        # Other dtypes are not joined: torch cannot copy some of them (int4), and copies some with a warning.
        joined = small and dtype.is_floating_point and dtype.itemsize > 1
        end = start + len(list(group))
        for first in range(start, end, _TOGETHER if joined else 1):
            yield slice(first, min(end, first + _TOGETHER) if joined else first + 1)
        start = end


def _index(parts: Iterable[tuple[Key, Declared, int, int]]) -> bytes:
    """Return the index of the data file as JSON members.

    A part is (key, declaration, number of the box in the leaf, start in the file). Many tensors share an
    outline (kind, shape, dtype, layout), so that each outline is stored once and named by its number.
    """
    outlines: dict[tuple[Any, ...], int] = {}
    tensors: dict[str, dict[str, list[Any]]] = {}
    for (unit, key), declared, number, start in parts:
        dtype, box = name_of(declared.dtypes[0]), declared.boxes[number]
        outline = declared.kind, declared.shape, dtype, declared.layout
        known, at = tensors.setdefault(unit, {}), outlines.setdefault(outline, len(outlines))
        if len(declared.boxes) == 1 and box.shape == declared.shape:
            known[key] = [at, start]
        else:
            known.setdefault(key, [at, []])[1].append([*box, start])
    named = [dict(zip(("kind", "shape", "dtype", "layout"), outline, strict=True)) for outline in outlines]
    return as_json({"outlines": named, "tensors": tensors})[1:-1]


def _name(key: Key, declared: Declared, number: int) -> str:
    """Return the name in the safetensors header: the key, and the offset if the box is a part."""
    box = declared.boxes[number]
    part = "" if box.shape == declared.shape else f"@{','.join(map(str, box.offset))}"
    return "/".join(filter(None, key)) + part


# -- copies of a device's tensors -------------------------------------------------------------------------


def staging_device(devices: Iterable[torch.device]) -> torch.device | None:
    """Return the first device other than the CPU for which torch can pin host memory, else None."""
    return next((device for device in devices if device.type != "cpu" and can_pin(device)), None)


@torch.no_grad()
def staged(
    tensors: Iterable[Tensor], device: torch.device, kept: list[Tensor] | None = None
) -> Iterator[Tensor]:
    """Yield the tensors' bytes on the host, row-major, in order: uint8, (size,).

    The host waits for the device once per piece, and the device copies the next piece meanwhile, on a stream
    of its own.

    Args:
        tensors: the tensors to copy. Tensors on other devices than `device` are copied synchronously.
        device: the device whose copies are asynchronous.
        kept: pinned tensors, one per piece; this call appends missing ones. If given, all pieces stay valid;
            otherwise each piece is valid until the next piece is requested.
    """
    stream, buffers = _stream(device), [] if kept is None else kept
    try:
        yield from _staged(map(_flat, tensors), device, stream, buffers, reuse=kept is None)
    except BaseException:
        # Ctrl-C too: a pending copy would overwrite the buffer of the next save.
        stream.synchronize()
        raise


def _staged(
    flat: Iterable[Tensor], device: torch.device, stream: torch.Stream, buffers: list[Tensor], *, reuse: bool
) -> Iterator[Tensor]:
    waiting: tuple[Tensor, torch.Event, list[Tensor]] | None = None
    for number, parts in enumerate(pieces(flat, PIECE_BYTES)):
        sizes = [part.numel() for part in parts]
        place = number % 2 if reuse else number
        if place == len(buffers):
            buffers.append(_pinned(sum(sizes)))
        filled = buffers[place][: sum(sizes)]
        stream.wait_stream(torch.accelerator.current_stream(device))
        with stream:
            for view, part in zip(filled.split(sizes), parts, strict=True):
                # Other devices copy on a stream that the event below does not cover: copy synchronously.
                view.copy_(part, non_blocking=part.device == device)
            copied = stream.record_event()
        if waiting is not None:
            yield _arrived(*waiting)
        waiting = filled, copied, parts
    if waiting is not None:
        yield _arrived(*waiting)


def _arrived(filled: Tensor, copied: torch.Event, parts: list[Tensor]) -> Tensor:
    """Wait for a copy, and return its host buffer.

    The caller keeps `parts` alive until here: the copy reads their memory on another stream.
    """
    copied.synchronize()
    return filled


def pieces(flat: Iterable[Tensor], size: int) -> Iterator[list[Tensor]]:
    """Cut flat tensors into lists of parts with `size` items in total; the last list may have fewer."""
    piece: list[Tensor] = []
    room = size
    for tensor in flat:
        start, items = 0, tensor.numel()
        while start < items:
            piece.append(tensor[start : start + room])
            start += piece[-1].numel()
            room -= piece[-1].numel()
            if not room:
                yield piece
                piece, room = [], size
    if piece:
        yield piece


def _flat(tensor: Tensor) -> Tensor:
    if not tensor.is_contiguous() and tensor.nbytes > PIECE_BYTES:
        tensor = tensor.detach().cpu()  # the device may lack memory for a second copy
    return as_bytes(tensor)


def _stream(device: torch.device) -> torch.Stream:
    return torch.Stream(device)


def _pinned(size: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

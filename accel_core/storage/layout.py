"""The file layout of a rank's share, reused between saves while no leaf changes."""

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
"""Size up to which tensors are written together."""
PIECE_BYTES: Final = 64 << 20
"""Number of bytes copied at once.

Two such pieces are all the pinned memory that a save takes which training waits for. A power of two: torch
pins no other sizes.
"""
_TOGETHER: Final = 256
"""Number of small tensors that are written at once."""


@define(eq=False)
class Layout:
    """The place of each box that this rank writes in its data file.

    name: one word on all ranks, for the plan that they made together. declared: this rank's leaves then.
    head: what the data file starts with. index: the members of the rank's JSON file that tell of the tensors,
    which have `size` bytes.
    """

    name: str
    declared: Mapping[Key, Declared]
    head: bytes
    index: bytes
    size: int
    keys: list[Key]
    """The leaf of each box, in the order of the file."""
    _shards: Sequence[int]
    """The number of each in its leaf."""
    _pieces: list[slice]
    """Boxes that are written and copied together.

    Each write has a price, and so has each view of the buffer.
    """
    _buffer: Tensor | None = field(default=None, init=False)
    _rooms: list[Tensor] = field(factory=list, init=False)
    """The place of each piece in the buffer."""
    _pinned: list[Tensor] = field(factory=list, init=False)
    """The buffer of a device's tensors, in pieces."""

    @classmethod
    def of(
        cls,
        name: str,
        declared: Mapping[Key, Declared],
        writes: Mapping[Key, list[Box]],
        leaves: Leaves,
    ) -> Layout:
        """Return the layout in which this rank writes the boxes that were planned for it."""
        parts = [
            (key, number)
            for key, wanted in writes.items()
            for number, box in enumerate(declared[key].boxes)
            if box in wanted
        ]
        # The widest first, so each is aligned to its own item size; then those that are copied together.
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
        """Return the data file's body, straight from tensors that must not change.

        Each part is valid until the next one is asked for.
        """
        joined, device = self._joined(leaves)
        return map(bytes_of, joined if device is None else staged(joined, device))

    @torch.no_grad()
    def stage(self, leaves: Leaves) -> list[memoryview]:
        """Return the data file's body in memory that the next save overwrites."""
        joined, device = self._joined(leaves)
        if device is not None:
            return [part.numpy().data for part in staged(joined, device, self._pinned)]
        if self._buffer is None:
            tensors = self.tensors(leaves)
            with torch.inference_mode(False):  # later saves write into it, in whatever mode
                buffer = torch.empty(self.size, dtype=torch.uint8, device="cpu")
                self._rooms = _rooms(buffer, [tensors[piece] for piece in self._pieces])
            self._buffer = buffer  # last: Ctrl-C may come before the rooms are there
        for room, piece in zip(self._rooms, joined, strict=True):
            room.copy_(piece)
        return [self._buffer.numpy().data]

    def _joined(self, leaves: Leaves) -> tuple[Iterator[Tensor], torch.device | None]:
        """Return the tensors, small ones joined, and the device to stage from."""
        tensors = self.tensors(leaves)
        devices = {tensor.device for tensor in tensors}
        return _joined(tensors, self._pieces, mixed=len(devices) > 1), staging_device(devices)


def _joined(tensors: Sequence[Tensor], pieces: Iterable[slice], *, mixed: bool = False) -> Iterator[Tensor]:
    """Yield each piece of the tensors as one tensor.

    Each is valid until the next one is asked for. mixed: they are on several devices.
    """
    for piece in pieces:
        several = tensors[piece]
        if mixed and len({tensor.device for tensor in several}) > 1:
            several = [tensor.cpu() for tensor in several]
        yield several[0] if len(several) == 1 else _flatten_dense_tensors(several)


def _rooms(buffer: Tensor, pieces: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return the places of these pieces, one after the other."""
    parts = buffer.split([sum(tensor.nbytes for tensor in piece) for piece in pieces])
    return [
        part.view(piece[0].dtype).view(piece[0].shape if len(piece) == 1 else -1)
        for part, piece in zip(parts, pieces, strict=True)
    ]


def _pieces(tensors: Sequence[Tensor]) -> Iterator[slice]:
    """Cut tensors into those to take together.

    These are small ones of one dtype; each of the others is alone.
    """
    start = 0
    for (dtype, small, _), group in groupby(
        tensors, lambda tensor: (tensor.dtype, tensor.nbytes <= SMALL_BYTES, tensor.device)
    ):
        # Of others, torch copies some not at all (int4), and some with a warning.
        joined = small and dtype.is_floating_point and dtype.itemsize > 1
        end = start + len(list(group))
        for first in range(start, end, _TOGETHER if joined else 1):
            yield slice(first, min(end, first + _TOGETHER) if joined else first + 1)
        start = end


def _index(parts: Iterable[tuple[Key, Declared, int, int]]) -> bytes:
    """Return the index of these parts.

    Each is a leaf, the number of the box in it, and its start in the file. Tensors are many, their outlines
    few, so that each stands there once.
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
    """Return the name in the safetensors header: key and start of the part."""
    box = declared.boxes[number]
    part = "" if box.shape == declared.shape else f"@{','.join(map(str, box.offset))}"
    return "/".join(filter(None, key)) + part


# -- copies of a device's tensors -------------------------------------------------------------------------


def staging_device(devices: Iterable[torch.device]) -> torch.device | None:
    """Return the one among these devices whose tensors `staged` copies best.

    None where torch cannot pin for it.
    """
    return next((device for device in devices if device.type != "cpu" and can_pin(device)), None)


@torch.no_grad()
def staged(
    tensors: Iterable[Tensor], device: torch.device, kept: list[Tensor] | None = None
) -> Iterator[Tensor]:
    """Yield the tensors' bytes on the host, row-major, in order: uint8, (size,).

    The host waits for the device once a piece, and the device copies the next piece meanwhile, on a stream of
    its own. Each piece is valid until the next one is asked for, or, if `kept` is given, for good.

    tensors: those of other devices are waited for one by one. kept: pinned memory, a tensor for each piece,
    which this call adds to where there is none yet.
    """
    stream, buffers = _stream(device), [] if kept is None else kept
    try:
        yield from _staged(map(_flat, tensors), device, stream, buffers, reuse=kept is None)
    except BaseException:
        # Ctrl-C too: a copy that is still to come would overwrite what the next save stages.
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
                # Another device copies on a stream of its own, which the event below knows nothing of.
                view.copy_(part, non_blocking=part.device == device)
            copied = stream.record_event()
        if waiting is not None:
            yield _arrived(*waiting)
        waiting = filled, copied, parts
    if waiting is not None:
        yield _arrived(*waiting)


def _arrived(filled: Tensor, copied: torch.Event, parts: list[Tensor]) -> Tensor:
    """Wait for a copy.

    `parts` live until here: another stream than theirs reads them.
    """
    copied.synchronize()
    return filled


def pieces(flat: Iterable[Tensor], size: int) -> Iterator[list[Tensor]]:
    """Cut flat tensors into lists of parts with `size` items together.

    The last list has fewer.
    """
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
        tensor = tensor.detach().cpu()  # the device may have no room for another copy of it
    return as_bytes(tensor)


def _stream(device: torch.device) -> torch.Stream:
    return torch.Stream(device)


def _pinned(size: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

"""Copy tensors of a device into pinned memory, a piece while the last is written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import torch
from torch import Tensor

from accel_core.storage.tensor_bytes import as_bytes, can_pin

PIECE_BYTES: Final = 64 << 20
"""Number of bytes copied at once.

Two such pieces are all the pinned memory that a save takes which training waits for. A power of two: torch
pins no other sizes.
"""


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

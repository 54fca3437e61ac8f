"""Copy tensors of a device into pinned memory, a piece while the last is written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import torch
from torch import Tensor

from accel_core.distributed.nested import can_pin

PIECE_BYTES: Final = 64 << 20
"""Number of bytes copied at once.

Two such pieces are all the pinned memory that a save takes.
"""


def staging_device(devices: Iterable[torch.device]) -> torch.device | None:
    """Return the one among these devices whose tensors `staged` copies best.

    None where torch cannot pin for it.
    """
    return next((device for device in devices if device.type != "cpu" and can_pin(device)), None)


@torch.no_grad()
def staged(tensors: Sequence[Tensor], device: torch.device) -> Iterator[Tensor]:
    """Yield the tensors' bytes on the host, row-major, in order: uint8, (size,).

    Each piece is valid until the next one is asked for. The host waits for the device once a piece, and
    the device copies the next piece meanwhile, on a stream of its own.
    """
    stream = _stream(device)
    buffers = [_pinned(PIECE_BYTES), _pinned(PIECE_BYTES)]
    waiting: tuple[Tensor, torch.Event, list[Tensor]] | None = None
    for number, parts in enumerate(_pieces(tensors)):
        filled = buffers[number % 2][: sum(part.numel() for part in parts)]
        stream.wait_stream(torch.accelerator.current_stream(device))
        with stream:
            for view, part in zip(filled.split([part.numel() for part in parts]), parts, strict=True):
                view.copy_(part, non_blocking=True)
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


def _pieces(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Cut the tensors' flat bytes into lists of at most PIECE_BYTES."""
    piece: list[Tensor] = []
    room = PIECE_BYTES
    for tensor in tensors:
        for part in _flat(tensor).split(PIECE_BYTES):
            if part.numel() > room:
                yield piece
                piece, room = [], PIECE_BYTES
            piece.append(part)
            room -= part.numel()
    if piece:
        yield piece


def _flat(tensor: Tensor) -> Tensor:
    data = tensor.detach().resolve_conj().resolve_neg()
    if not data.is_contiguous() and data.nbytes > PIECE_BYTES:
        data = data.cpu()  # the device may have no room for another copy of it
    return data.contiguous().reshape(-1).view(torch.uint8)


def _stream(device: torch.device) -> torch.Stream:
    return torch.Stream(device)


def _pinned(size: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

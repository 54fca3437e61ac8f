"""Move batches to the device: the next one moves while the user holds this one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from accel_core.data.sharding import with_last

if TYPE_CHECKING:
    from accel_core.contract.run import Run

Mover = Callable[[Iterator[Any]], Iterator[Any]]
"""Batches -> the same batches, on the device."""


def batch_mover(
    run: Run, *, moves: bool, ahead: bool, pinned: bool = False, read_here: bool = False
) -> Mover | None:
    """Return the function that moves a loader's batches; None if they stay.

    moves: put them on the run's device. ahead: start moving a batch before it is asked for. pinned: batches
    are in pinned memory, so that nothing waits for a copy (torch reuses that memory only after the copy).
    read_here: in this process, so that the memory may be the user's own.
    """
    device, mark, refine = run.device, run.mark_step, run.hooks.step("place_batch")
    moves, asked = moves and device.type != "cpu", run.config.data.non_blocking
    waits = read_here and pinned and not asked and mark is None
    non_blocking = asked or (pinned and (waits or not read_here))
    move = partial(_move, run.hooks.move, device, non_blocking) if moves else None
    # A device that records its work lazily must not find the next batch in the middle of this one's graph.
    stream = _stream(device) if moves and ahead and mark is None else None
    start: Callable[..., Any] | None
    start = move and (partial(_ahead, move, stream) if stream is not None else partial(map, move))
    start = partial(_in_turn, move, device) if move and waits and stream is None else start
    wrap, topology = run.hooks.step("wrap_dataloader") if moves and ahead else None, run.topology
    if wrap is not None:
        start = lambda batches: wrap(batches, topology)  # noqa: E731 - one of three
    if mark is None and refine is None:
        return start

    def place(batches: Iterator[Any]) -> Iterator[Any]:
        unit = run.units[0] if len(run.units) == 1 else None
        moved = batches if start is None else start(batches)
        mark_batch = None if "batch" in getattr(moved, "marks", ()) else mark
        for batch in moved:
            placed = batch if refine is None else refine(unit, batch, device)
            if mark_batch is not None:
                mark_batch("batch")
            yield placed

    return place


def _move(move: Callable[..., Any], device: torch.device, non_blocking: bool, batch: Any) -> Any:
    return move(batch, device, non_blocking)


def _stream(device: torch.device) -> torch.Stream | None:
    """Return a stream beside the computing one; None if the device has none."""
    if torch.accelerator.current_accelerator() != torch.device(device.type):
        return None
    try:
        return torch.Stream(device)
    except RuntimeError:  # also NotImplementedError: devices without streams say it in either way
        return None


def _in_turn(move: Callable[[Any], Any], device: torch.device, batches: Iterator[Any]) -> Iterator[Any]:
    """Move each batch when it is asked for, and read the next one after its copy.

    The next one, of any loader, may be read into the same memory, such as a buffer of the user's collate
    function.
    """
    batches, wait_for_copies = iter(batches), _wait_for_copies  # globals are gone at the interpreter's end
    while True:
        wait_for_copies()
        try:
            batch = next(batches)
        except StopIteration:
            return
        moved = [move(batch)]
        _copies.append(torch.accelerator.current_stream(device).record_event())
        del batch
        try:
            yield moved.pop()
        finally:
            wait_for_copies()


_copies: Final[list[torch.Event]] = []
"""Events after copies of pinned batches that were read here, of all loaders."""


def _wait_for_copies(copies: list[torch.Event] = _copies) -> None:
    for copied in [*copies]:
        copied.synchronize()
        with suppress(ValueError):  # a thread has waited for it too
            copies.remove(copied)


def _ahead(move: Callable[[Any], Any], stream: torch.Stream, batches: Iterator[Any]) -> Iterator[Any]:
    readers: set[torch.Stream] = set()
    current_stream = torch.accelerator.current_stream  # globals are gone at the interpreter's end

    def wait_for_readers() -> None:
        """Have this stream wait for all that reads batches by now."""
        readers.add(current_stream(stream.device))
        for each in readers:
            stream.wait_stream(each)

    def start(batch: Any) -> tuple[Any, torch.Event]:
        # This batch may get memory of one that the user has dropped: kernels that still read it come first.
        wait_for_readers()
        with stream:
            return move(batch), stream.record_event()

    try:
        for (batch, moved), _ in with_last(map(start, batches)):
            reader = current_stream(stream.device)
            readers.add(reader)
            reader.wait_event(moved)
            yield batch
    finally:
        # The next loop may run on another stream, and an emptied cache gives memory back without asking the
        # readers: both ask this stream only, whose memory it is.
        wait_for_readers()

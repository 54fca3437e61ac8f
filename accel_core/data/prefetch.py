"""Placement of batches on the device: the next batch moves while the user holds this one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen

from accel_core.data.sharding import with_last
from accel_core.distributed.nested import send_to_device

if TYPE_CHECKING:
    from accel_core.contract.run import Run
    from accel_core.contract.world import Topology

Mover = Callable[[Iterator[Any]], Iterator[Any]]
"""Batches -> the same batches, on the device."""


@frozen(kw_only=True)
class Placement:
    """The way in which a loader's batches get to the run's device.

    Attributes:
        move: moves a batch to the device; None if batches stay on the host.
        start: moves a loop's batches to the device, perhaps before they are asked for; None if they stay.
        reads: the device's plugin reads the loop's batches itself (`wrap_dataloader`).
        refine: the plugins' `place_batch`.
        mark: the plugins' `mark_step`.
    """

    run: Run
    move: Callable[[Any], Any] | None
    start: Mover | None
    reads: bool
    refine: Callable[..., Any] | None
    mark: Callable[[str], None] | None

    def all(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return a loop's batches, placed."""
        moved = batches if self.start is None else self.start(batches)
        if self.refine is None and self.mark is None:
            return moved
        mark = None if "batch" in getattr(moved, "marks", ()) else self.mark
        return map(partial(self._finish, mark), moved)

    def one(self, batch: Any) -> Any:
        """Return a batch, placed now. The caller keeps a reference to the original batch."""
        return self._finish(self.mark, batch if self.move is None else self.move(batch))

    def _finish(self, mark: Callable[[str], None] | None, batch: Any) -> Any:
        if self.refine is not None:
            units = self.run.units
            batch = self.refine(units[0] if len(units) == 1 else None, batch, self.run.device)
        if mark is not None:
            mark("batch")
        return batch


def placement_of(run: Run, *, moves: bool, ahead: bool, pinned: bool = False) -> Placement | None:
    """Return the placement of a loader's batches; None if batches are used as they are.

    Args:
        run: the run of the loader.
        moves: put batches on the run's device.
        ahead: start moving a batch before it is asked for.
        pinned: batches are in pinned memory, so that nothing waits for a copy (torch reuses the memory only
            after the copy).
    """
    device, mark, refine = run.device, run.mark_step, run.hooks.step("place_batch")
    moves = moves and device.type != "cpu"
    if not moves and mark is None and refine is None:
        return None
    non_blocking = run.config.data.non_blocking or pinned
    move = partial(send_to_device, device=device, non_blocking=non_blocking) if moves else None
    # A lazily recorded device must not find the next batch's copy in the middle of this batch's graph.
    stream = _stream(device) if moves and ahead and mark is None else None
    wrap, topology = run.hooks.step("wrap_dataloader") if moves and ahead else None, run.topology
    start: Mover | None = None
    if move is not None:
        start = partial(map, move) if stream is None else partial(_ahead, move, stream)
    if wrap is not None and start is not None:
        start = partial(_wrapped, wrap, topology, start)
    return Placement(run=run, move=move, start=start, reads=wrap is not None, refine=refine, mark=mark)


def _wrapped(
    wrap: Callable[..., Any], topology: Topology, usual: Mover, batches: Iterator[Any]
) -> Iterator[Any]:
    """Return the batches as moved by a plugin, or in the usual way if the plugin returns `batches` itself."""
    made: Iterator[Any] = wrap(batches, topology)
    return usual(batches) if made is batches else made


def _stream(device: torch.device) -> torch.Stream | None:
    """Return a stream beside the computing stream; None if the device has no streams."""
    if torch.accelerator.current_accelerator() != torch.device(device.type):
        return None
    try:
        return torch.Stream(device)
    except RuntimeError:  # or its subclass NotImplementedError: devices without streams raise either
        return None


def _ahead(move: Callable[[Any], Any], stream: torch.Stream, batches: Iterator[Any]) -> Iterator[Any]:
    """Yield moved batches; the next batch moves on `stream` while the user holds this one."""
    readers: set[torch.Stream] = set()
    current_stream = torch.accelerator.current_stream  # globals are gone at the interpreter's end

    def wait_for_readers() -> None:
        """Make `stream` wait for all streams that have read batches so far."""
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
        # The next loop may use another stream, and emptying the cache frees memory without waiting for
        # readers: both wait for `stream` only, which owns the memory.
        wait_for_readers()

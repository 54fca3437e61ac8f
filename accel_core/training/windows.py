"""Windows whose micro-batches are read and counted before training on them (`Accelerator.windows`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from accel_core.contract.window import WindowSize
from accel_core.data.uneven import refuse_items
from accel_core.distributed.exchange import collective_call
from accel_core.errors import AccelError

if TYPE_CHECKING:
    from torch import Tensor

    from accel_core.contract.run import Run
    from accel_core.training.accumulation import Accumulation

Count = Callable[[Any], "Tensor | float"]


def windows(
    accumulation: Accumulation, batches: Iterable[Any], count: Count | None, size: int | None
) -> Iterator[CountedWindow]:
    """Yield the windows of these batches. Implements `Accelerator.windows`."""
    run = accumulation.run
    with closing(_read(batches)) as reader:
        settle = getattr(reader, "settle", None)
        # Ranks that will train on parts of the same sequences count whole sequences, unless already cut.
        counters = run.topology.readers if getattr(reader, "is_whole", False) else run.topology.losses
        while True:
            pairs = list(islice(reader, size or run.accumulation_steps))
            alone = any(
                unit.step_state.uneven or unit.step_state.no_sync_depth for unit in accumulation.units
            )
            items = None
            if count is not None:
                refuse_items(accumulation.units)
                items = _total(run, [_count_of(count(batch)) for batch, _ in pairs])
            window_size = _window_size_of(run, batches, len(pairs), items, counters, alone=alone)
            if not pairs:
                return
            yield CountedWindow(accumulation, pairs, window_size, settle)


class CountedWindow:
    """An iterable of the micro-batches of one optimizer step, which enters the context of each.

    `len()` is the number of micro-batches. `items` is (items of this rank, items of all ranks), or None if
    items were not counted.
    """

    def __init__(
        self,
        accumulation: Accumulation,
        batches: Sequence[tuple[Any, Callable[[], Any]]],
        window_size: WindowSize,
        settle: Callable[[], object] | None,
    ) -> None:
        self._accumulation, self._window_size = accumulation, window_size
        self._batches, self._settle = batches, settle

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def items(self) -> tuple[Tensor | float, Tensor | float] | None:
        return self._window_size.items

    def __iter__(self) -> Iterator[Any]:
        accumulation, last, is_left = self._accumulation, len(self) - 1, True
        try:
            for number, batch in enumerate(self._handed_out()):
                with accumulation.for_batch(batch, self._window_size, last=number == last):
                    yield batch
            is_left = False
        finally:  # runs on `break` and after an error too, when the generator is closed or collected
            for unit in accumulation.units:
                if unit.window.is_begun or (is_left and unit.step_state.phases):  # not applied, not cleared
                    unit.begin_anew()

    def whole(self) -> tuple[Iterator[Any], int, WindowSize]:
        """Return the arguments of `forward_backward`: batches, their number, and the window's size."""
        return self._handed_out(), len(self), self._window_size

    def _handed_out(self) -> Iterator[Any]:
        for number, (_, hand_out) in enumerate(self._batches, 1):
            batch = hand_out()
            if number == len(self) and self._settle is not None:
                self._settle()  # a save before this counts no batch of the window; a save after it counts all
            yield batch


def _read(batches: Any) -> Any:
    """Return an iterator over (batch as read, function that hands the batch out)."""
    if hasattr(batches, "host_batches"):
        return batches.host_batches()
    return ((batch, partial(_same, batch)) for batch in batches)


def _same(batch: Any) -> Any:
    return batch


def _count_of(items: Any) -> Tensor | float:
    """Return the number of items of a batch; a number on a device stays a 0-dim tensor there."""
    if isinstance(items, torch.Tensor) and items.device.type != "cpu":
        return items.detach().reshape(())
    return float(items)


def _total(run: Run, items: Sequence[Tensor | float]) -> Tensor | float:
    """Return the sum of a window's counts on this rank, as a device tensor if any count is on a device."""
    on_device = [each for each in items if isinstance(each, torch.Tensor)]
    host = sum(each for each in items if not isinstance(each, torch.Tensor))
    if not on_device:
        return host
    wide = torch.float64 if "float64" in run.hooks.capabilities(run.device) else torch.float32
    return torch.stack([each.to(wide) for each in on_device]).sum() + host


def _window_size_of(
    run: Run, batches: Any, size: int, items: Tensor | float | None, counters: int, *, alone: bool
) -> WindowSize:
    """Return the size of the window, agreed by all ranks. Collective, unless `alone` is True.

    Args:
        run: the run.
        batches: the iterable of batches, for error messages.
        size: micro-batches on this rank.
        items: items on this rank; None if they are not counted.
        counters: number of ranks that count different items; the other ranks count the same items again.
        alone: ranks may run out of batches at different times, or are in `no_sync`: use this rank's figures.

    Raises:
        AccelError: ranks have different numbers of micro-batches.
    """
    losses = run.topology.losses
    total = items
    if run.world.size > 1 and not alone:
        host = -1.0 if items is None or isinstance(items, torch.Tensor) else items
        with collective_call(run, "world", "windows", None, objects=True) as call:
            sizes, counts = zip(*call.all_objects((size, host)), strict=True)
        if len({*sizes}) > 1:
            what = type(getattr(batches, "dataset", batches)).__name__
            each = ", ".join(f"rank {rank} has {int(size)}" for rank, size in enumerate(sizes))
            raise AccelError(
                f"windows: ranks have different numbers of batches of the {what}: {each}\n"
                "prepare the loader with data.even_batches on; or train inside join_uneven_inputs"
            )
        if isinstance(items, torch.Tensor):
            total = run.collectives("world").all_reduce(items.clone(), "mean") * counters
        elif items is not None:
            total = sum(counts) / len(counts) * counters
    if items is None or total is None:
        return WindowSize(size=size, divisor=size)
    divisor: Tensor | float
    if isinstance(total, torch.Tensor):
        divisor = torch.where(total > 0, total / losses, float("inf"))
    else:
        divisor = total / losses or float("inf")  # without any items, all gradients are 0
    return WindowSize(size=size, divisor=divisor, items=(items, total))

"""Batches on their way to an XLA device.

Threads of torch_xla upload the next ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from accel_core import ops

if TYPE_CHECKING:
    from accel_core import Run

__all__ = ["Uploading"]


class Uploading:
    """The batches of an iterable, on the run's device.

    What torch_xla's MpDeviceLoader does.
    """

    marks = frozenset({"batch"})
    """It ends the recorded graph before each batch itself."""

    def __init__(self, batches: Iterable[Any], run: Run, prefetch: int) -> None:
        self._batches, self._run, self._prefetch = batches, run, prefetch
        self._failure: BaseException | None = None

    def __iter__(self) -> Iterator[Any]:
        from torch_xla.distributed.parallel_loader import ParallelLoader

        device = self._run.device

        class Loader(ParallelLoader):  # type: ignore[misc]  # torch_xla has no types
            """Structures keep their types, as with any other device."""

            def send_cpu_data_to_device(self, batches: list[Any], device: Any) -> list[Any]:
                return [ops.send_to_device(batch, device) for batch in batches]

        loader = Loader(self._guarded(), [device], device_prefetch_size=self._prefetch)
        try:
            yield from loader.per_device_loader(device)
        finally:
            loader.close()
        if self._failure is not None:
            raise self._failure

    def _guarded(self) -> Iterator[Any]:
        try:
            yield from self._batches
        except BaseException as error:  # torch_xla's thread would die of it, and the epoch end early
            self._failure = error

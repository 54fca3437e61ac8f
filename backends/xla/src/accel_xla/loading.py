"""Upload of batches to an XLA device by threads of torch_xla, ahead of the training loop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from accel_core import ops

if TYPE_CHECKING:
    from accel_core import Run

__all__ = ["Uploading"]


class Uploading:
    """The batches of an iterable on the run's device, as torch_xla's MpDeviceLoader provides them."""

    marks = frozenset({"batch"})
    """Points at which this loader ends the recorded graph itself."""

    def __init__(self, batches: Iterable[Any], run: Run, prefetch: int) -> None:
        self._batches, self._run, self._prefetch = batches, run, prefetch
        self._failure: BaseException | None = None

    def __iter__(self) -> Iterator[Any]:
        from torch_xla.distributed.parallel_loader import ParallelLoader

        device = self._run.device

        class Loader(ParallelLoader):  # type: ignore[misc]  # torch_xla has no types
            """A loader that keeps the types of structures, as core does on every other device."""

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
        except BaseException as error:  # it would end torch_xla's thread, and silently the epoch
            self._failure = error

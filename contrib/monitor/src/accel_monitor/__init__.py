"""The record of a run, as a page, a summary or a live screen, and names of ranks that hang or drift apart.

Importing this package imports none of its modules (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_core import Accelerator
    from accel_monitor.config import MonitorConfig, ReplicasConfig

__all__ = ["MonitorConfig", "ReplicasConfig", "metrics"]
__version__ = "0.1.0"


def metrics(
    accelerator: Accelerator, *, flops_per_sample: float | None = None, flops_per_item: float | None = None
) -> dict[str, float]:
    """Return speed and memory of the last sampled step, as values to log.

    Not collective. It waits for nothing: a device's sample comes a step or more after it was taken.

    Args:
        accelerator: the run's.
        flops_per_sample: FLOPs of the model's forward and backward for one sample of a batch.
        flops_per_item: the same for one of the `items` of `windows`, such as a token.

    Returns on the main process, as far as they are known: `seconds` of a step (the mean since the
    sample before), `samples_per_second` and `items_per_second` of all ranks, `data_seconds`,
    `forward_seconds` and so on of the sampled step, `memory_allocated` and so on in bytes. `mfu`: the
    FLOPs a second over those that all devices can do in the run's precision, or in the
    parameters' only dtype if that is "no"; nothing where the FLOPs, the rate or the peak is not known.
    Empty before the first sample, and on other ranks.

    Raises:
        AccelError: the run keeps no record of itself: it has no project folder; or both FLOPs are given.
    """
    counts = {"samples_per_second": flops_per_sample, "items_per_second": flops_per_item}
    monitor: Any = accelerator.run.plugins["monitor"]
    found: dict[str, float] = monitor.metrics(counts)
    return found


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'accel_monitor' has no attribute {name!r}", name=name)
    from accel_monitor import config

    return getattr(config, name)

"""Numbers that the caller gives for a checkpoint."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from accel_core.contract.config import metric_and_mode
from accel_core.errors import CheckpointError

if TYPE_CHECKING:
    from accel_core.storage.manifest import Manifest


def numbers_of(step: Any, metrics: Mapping[str, Any] | None, keep_best: str | None) -> dict[str, Any]:
    """Return the caller's numbers as members of a manifest; "nan" and "inf" are text there.

    keep_best: names a metric that must be there.

    Raises:
        CheckpointError: it is missing.
    """
    values = {name: float(value) for name, value in (metrics or {}).items()}
    needed = None if keep_best is None else metric_and_mode(keep_best)[0]
    if needed is not None and needed not in values:
        raise CheckpointError(
            f"save_state: project.keep_best goes by the metric {needed!r}, which is not among the"
            f" metrics ({', '.join(values) or 'none'})\n"
            f"call save_state(metrics={{{needed!r}: value}}) on all ranks"
        )
    return {
        "step": None if step is None else operator.index(step),
        "metrics": {name: value if math.isfinite(value) else repr(value) for name, value in values.items()},
    }


def metrics_of(manifest: Manifest) -> dict[str, float]:
    """Return the metrics of a checkpoint.

    Raises:
        CheckpointError: its manifest has something else there.
    """
    try:
        return {name: float(value) for name, value in manifest.members.get("metrics", {}).items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the manifest's metrics are not numbers: {error}\n"
            "load another checkpoint: `accel checkpoint list` shows those of a project"
        ) from error


def require_alike(of_ranks: Sequence[Mapping[str, Any]]) -> None:
    """Raise CheckpointError if ranks have different numbers."""
    for rank, numbers in enumerate(of_ranks):
        if numbers["metrics"] != of_ranks[0]["metrics"]:
            raise CheckpointError(
                f"save_state: rank 0 has the metrics {of_ranks[0]['metrics']}, rank {rank} has"
                f" {numbers['metrics']}\n"
                "give all ranks the same: accelerator.reduce(value, 'mean') before the save"
            )

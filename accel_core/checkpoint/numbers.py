"""Numbers that the caller gives for a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import define

from accel_core.contract.arguments import whole_number
from accel_core.contract.config import metric_and_mode
from accel_core.errors import CheckpointError


@define
class Numbers:
    """The step and the metrics of a save, as its caller gave them.

    keep_best: names the metric that must be there.
    """

    step: int | None
    metrics: Mapping[str, Any] | None
    keep_best: str | None

    def checked(self) -> dict[str, float | str]:
        """Keep them as the manifest has them, and return the metrics. Raises CheckpointError."""
        self.step = plain_step(self.step)
        self.metrics = plain_metrics(self.metrics, self.keep_best)
        return self.metrics

    def members(self) -> dict[str, Any]:
        """Return them as members of a manifest."""
        return {"step": self.step, "metrics": self.metrics}


def plain_metrics(metrics: Mapping[str, Any] | None, keep_best: str | None) -> dict[str, float | str]:
    """Return the metrics as the manifest has them; "nan" and "inf" are text.

    keep_best: names one that must be there.

    Raises:
        CheckpointError: it is missing, one is not a number, or they have no names.
    """
    if not isinstance(metrics, Mapping | None):
        raise CheckpointError(
            f"save_state: metrics is {metrics!r:.80}, which has no names\n"
            "give a mapping: metrics={'loss': loss}"
        )
    named = {name: _number(name, value) for name, value in (metrics or {}).items()}
    needed = None if keep_best is None else metric_and_mode(keep_best)[0]
    if needed is not None and needed not in named:
        raise CheckpointError(
            f"save_state: project.keep_best goes by the metric {needed!r}, which is not among the"
            f" metrics ({', '.join(named) or 'none'})\n"
            f"call save_state(metrics={{{needed!r}: value}}) on all ranks"
        )
    return named


def plain_step(step: Any) -> int | None:
    """Return the caller's step as the manifest has it.

    Raises:
        CheckpointError: it is not a whole number.
    """
    number = whole_number(step, -math.inf)
    if step is not None and number is None:
        raise CheckpointError(
            f"save_state: step is {step!r:.80}, and not a whole number\n"
            "give the number of the step, or another value as metrics={name: value}"
        )
    return number


def require_alike(of_ranks: Sequence[Mapping[str, float | str]]) -> None:
    """Raise CheckpointError if ranks have different metrics."""
    for rank, metrics in enumerate(of_ranks):
        if metrics != of_ranks[0]:
            raise CheckpointError(
                f"save_state: rank 0 has the metrics {of_ranks[0]}, rank {rank} has {metrics}\n"
                "give all ranks the same: accelerator.reduce(value, 'mean') before the save"
            )


def _number(name: str, value: Any) -> float | str:
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise CheckpointError(
            f"save_state: metric {name!r} is {value!r}, and not a number\ngive a number, or a tensor of one"
        ) from error
    return number if math.isfinite(number) else repr(number)

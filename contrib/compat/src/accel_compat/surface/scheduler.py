"""What `prepare` returns for schedulers."""

from __future__ import annotations

from typing import Any

from accel_compat.refusing import unserved
from accel_core import PreparedScheduler

from .state import AcceleratorState, GradientState
from .utils._enums import DistributedType

__all__ = ["AcceleratedScheduler"]

_INF = float("inf")


class AcceleratedScheduler(PreparedScheduler):
    """A scheduler that steps with its optimizer, once for each process: as if these took turns.

    So a schedule counts batches of the size that the program gave, on however many processes. Under
    `split_batches`, and under DeepSpeed and Megatron, it steps once.
    """

    def __init__(
        self, scheduler: Any, optimizers: Any, step_with_optimizer: bool = True, split_batches: bool = False
    ) -> None:
        several = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
        super().__init__(scheduler, several, follows=step_with_optimizer)
        self.__dict__.update(
            optimizers=several,
            step_with_optimizer=step_with_optimizer,
            split_batches=split_batches,
            gradient_state=GradientState(),
        )

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step as often as there are processes, if the optimizers were applied."""
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
        elif not self.gradient_state.sync_gradients:
            if self.gradient_state.adjust_scheduler:
                self.scheduler._step_count += 1  # else torch says that the optimizer came too late
        elif not any(optimizer.step_was_skipped for optimizer in self.optimizers):
            for _ in range(self._times()):
                # OneCycleLR raises beyond its last step, which a filled-up last round may reach.
                if getattr(self.scheduler, "_step_count", 0) <= getattr(self.scheduler, "total_steps", _INF):
                    self.scheduler.step(*args, **kwargs)

    def _times(self) -> int:
        state = AcceleratorState()
        once = self.split_batches or state.distributed_type in (
            DistributedType.DEEPSPEED,
            DistributedType.MEGATRON_LM,
        )
        return 1 if once else int(state.num_processes)


__getattr__ = unserved(__name__)

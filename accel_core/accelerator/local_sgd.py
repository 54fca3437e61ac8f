"""Local SGD: ranks step alone, and average weights now and then."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from accel_core.distributed.collectives import average
from accel_core.errors import ConfigError
from accel_core.plugins.discovery import suggest_strategy
from accel_core.training.accumulation import units_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from torch import nn
    from typing_extensions import Self

    from accel_core.accelerator.accelerator import Accelerator


class LocalSGD:
    """Context in which ranks step alone and average weights periodically.

    Gradients are not reduced inside; weights are averaged every `local_sgd_steps` steps (Stich, Local SGD
    Converges Fast and Communicates Little, 2019). Enter it on all ranks, with equally many steps.

    Call `step()` after each `optimizer.step()`, inside `accumulate` too: it counts optimizer steps. At the
    end, weights and the optimizer's state are averaged, so that ranks may share gradients again, and save. If
    the state has values other than floating-point tensors, numbers or text, or differs in structure between
    ranks, each rank keeps its own state, with a warning. Buffers are not averaged. After an exception nothing
    is averaged: continue from a checkpoint. Losses must be means.

    Args:
        accelerator: the Accelerator that prepared the model.
        model: a prepared model, whose optimizer is prepared too.
        local_sgd_steps: optimizer steps between two averages.
        enabled: False to do nothing.

    Raises:
        ConfigError: `local_sgd_steps` is below 1, the model's strategy does not offer `local_sgd`, or
            `data.even_batches` is off.
    """

    def __init__(
        self, accelerator: Accelerator, model: nn.Module, local_sgd_steps: int, enabled: bool = True
    ) -> None:
        if local_sgd_steps < 1:
            raise ConfigError(
                f"local_sgd_steps must be at least 1, got {local_sgd_steps!r}\n"
                "give the number of optimizer steps between two averages"
            )
        run = accelerator.run
        (self.unit,) = units_of(run, [model])
        self.every, self._steps, self._quiet = local_sgd_steps, 0, ExitStack()
        self._ranks = run.collectives(run.topology.loss_dim)
        self.enabled = enabled and self._ranks.size > 1
        if self.enabled and "local_sgd" not in self.unit.offers:
            raise ConfigError(
                f"LocalSGD: ranks cannot step by themselves under strategy {self.unit.strategy!r}\n"
                f"{suggest_strategy('local_sgd')}; or pass enabled=False"
            )
        if self.enabled and not run.config.data.even_batches:
            raise ConfigError(
                "LocalSGD: data.even_batches is off, so ranks may have fewer steps, and the others would wait"
                " for their averages\nset data.even_batches: true"
            )

    def __enter__(self) -> Self:
        if self.enabled:
            self._quiet.enter_context(self.unit.without_reduction())
        return self

    def step(self) -> None:
        """Count an optimizer step; after every `local_sgd_steps` steps, average the weights (collective)."""
        if self.enabled and self.unit.window.boundary:
            self._quiet.close()  # entered again: a strategy may have to reduce once in between
            self._quiet.enter_context(self.unit.without_reduction())
            self.count()

    def count(self) -> None:
        """Count a step, inside a window too; every `local_sgd_steps` steps, average weights (collective)."""
        self._steps += 1
        if self._steps % self.every == 0:
            self.unit.hooks.average_parameters(self.unit)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._quiet.close()
        if self.enabled and error is None:  # after an error the other ranks may never arrive
            self.unit.hooks.average_parameters(self.unit)
            self._average_state()

    def _average_state(self) -> None:
        """Average the state of optimizers, and take the maximum of step counts, which may be on the host."""
        means, counts, kinds, others = list[Tensor](), list[Tensor](), [], False
        for parameter, key, value in self._state():
            if type(value) is Tensor and value.is_floating_point():
                (counts if value.dim() == 0 < parameter.dim() else means).append(value)
                kinds.append((key, value.shape, value.dtype))
            else:  # such as 8-bit codes, whose mean is meaningless without their scales
                others = others or not isinstance(value, int | float | str | None)
        found = {repr(each) for each in self._ranks.all_gather_object((kinds, others))}
        if others or len(found) > 1:
            warnings.warn(
                f"LocalSGD of {self.unit.name!r}: each rank keeps its optimizer's state, which is not"
                " floating-point tensors, or not the same ones on all ranks\n"
                "train to the end inside LocalSGD: ranks that share gradients would drift apart",
                stacklevel=3,
            )
            return
        average(means, self._ranks)
        if counts:
            stacked = torch.stack([count.to(self.unit.run.device, torch.float32) for count in counts])
            for count, largest in zip(counts, self._ranks.all_reduce(stacked, "max"), strict=True):
                count.copy_(largest)

    def _state(self) -> Iterator[tuple[nn.Parameter, str, object]]:
        for optimizer in self.unit.optimizers:
            for parameter in (each for group in optimizer.param_groups for each in group["params"]):
                for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                    yield parameter, key, value

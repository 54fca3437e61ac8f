"""Local SGD: ranks step alone, and average their weights periodically."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from hashlib import sha256
from operator import itemgetter
from types import NoneType
from typing import TYPE_CHECKING

import torch

from accel_core.contract.arguments import whole_number
from accel_core.contract.step_hook import before_forward
from accel_core.data.uneven import refuse_another
from accel_core.distributed.collectives import average
from accel_core.errors import AccelError, ConfigError
from accel_core.plugins.discovery import offering
from accel_core.training.step import quiet

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from torch import nn
    from typing_extensions import Self

    from accel_core.accelerator.accelerator import Accelerator


class LocalSGD:
    """Context in which ranks step alone and average weights periodically.

    Gradients are not reduced inside; weights are averaged every `local_sgd_steps` steps.

    Call `step()` after each `optimizer.step()`: it counts optimizer steps, inside `accumulate` too.
    Weights are also averaged at the end, and the optimizer's state with them, so that ranks may share
    gradients again, and save. With a warning, each rank keeps its own state where it is not floating-point
    tensors (codes of 8 bits), or not the same ones on all ranks. Buffers are not averaged, and nothing is
    where a rank has the loss to itself. After an exception the end is the next forward with gradients.
    Where `data.even_batches` is off, ranks with fewer steps take part in the averages of the others, and go
    on with the schedule of a rank with the most steps. Losses are means there, and one model at a time is
    averaged.

    Args:
        accelerator: that prepared the model.
        model: as `prepare` returned it, with its optimizer.
        local_sgd_steps: optimizer steps between two averages.
        enabled: False to do nothing.

    Raises:
        ConfigError: the model's strategy does not offer `local_sgd`, or an argument is of another kind.
    """

    def __init__(
        self, accelerator: Accelerator, model: nn.Module, local_sgd_steps: int, enabled: bool = True
    ) -> None:
        every = whole_number(local_sgd_steps, 1)
        if every is None:
            raise ConfigError(f"LocalSGD: local_sgd_steps is {local_sgd_steps}\nset it to 1 or more steps")
        if not hasattr(accelerator, "run"):
            raise ConfigError(
                f"LocalSGD was given {accelerator!r:.80}, and not an Accelerator\n"
                "give the one that has prepared the model: LocalSGD(accelerator, model, steps)"
            )
        run = accelerator.run
        unit = run.prepared.unit_of_model(model)
        if unit is None:
            raise AccelError("LocalSGD: this run has not prepared the model\nprepare it, with its optimizer")
        self._run, self.unit, self.every = run, unit, every
        self._ranks = run.collectives(run.topology.loss_dim)
        self.enabled = enabled and self._ranks.size > 1
        self._uneven = not run.config.data.even_batches
        self._reduce = unit.steps.reduce_gradients
        if self.enabled and "local_sgd" not in run.cards[unit.strategy].offers:
            raise ConfigError(
                f"LocalSGD: ranks cannot step by themselves under strategy {unit.strategy!r}, whose card does"
                " not offer 'local_sgd'\n"
                f"{offering('local_sgd')}; or pass enabled=False"
            )
        self._steps = self._taken = 0
        self._silenced, self._inside = ExitStack(), ExitStack()

    def __enter__(self) -> Self:
        if self.enabled:
            if self._uneven:
                refuse_another(self._run, f"LocalSGD of {self.unit.name!r}")
                self._inside.enter_context(self.unit.step_state.in_uneven("LocalSGD"))
            self.unit.steps.reduce_gradients = None  # type: ignore[attr-defined]  # slots of the specs
            self._silence()
        return self

    def step(self) -> None:
        """Count an optimizer step; average after each `local_sgd_steps` of them.

        Collective when it averages.
        """
        if self.enabled and self.unit.window.boundary:
            self._silence()
            self._count()

    def _count(self) -> None:
        self._steps += 1
        self._taken += 1
        if self._steps == self.every:
            self._tell(going=True)
            self._average()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.enabled:
            self.unit.steps.reduce_gradients = self._reduce  # type: ignore[attr-defined]
            self._silenced.close()
            self._inside.close()
            if error is None:
                self._end()
            else:  # the other ranks may never come
                self._end_in_forward()

    def _silence(self) -> None:
        # Entered anew each step: a strategy may have to reduce once before it can leave it out.
        self._silenced.close()
        self._silenced.enter_context(quiet(self.unit, self.unit.wrapped))

    def _end(self) -> None:
        going = True
        while going:
            going, stepped = self._tell(going=False)
            if stepped or not going:  # an exception or `break` may follow a step that is not counted
                self._average()
        self._average_state()
        self._share_schedules()

    def _end_in_forward(self) -> None:
        """Average in the next forward that can be trained on, if all ranks go on to one."""
        hooks = ExitStack()

        def end(module: nn.Module) -> None:
            if torch.is_grad_enabled():
                hooks.close()
                if self._run.prepared.unit_of_model(module) is self.unit:
                    self._end()

        for model in self.unit.wrapped:
            hooks.callback(before_forward(model, end))

    def _tell(self, *, going: bool) -> tuple[bool, bool]:
        """Return whether a rank goes on, and whether one has steps to average.

        Collective where ranks may have different numbers of steps.
        """
        if not self._uneven:
            return going, self._steps > 0
        told = torch.tensor([going, self._steps > 0], dtype=torch.float32, device=self.unit.run.device)
        any_going, any_stepped = self._ranks.all_reduce(told, "max").tolist()
        return any_going > 0, any_stepped > 0

    def _average(self) -> None:
        self._steps = 0
        self.unit.hooks.average_parameters(self.unit)
        self.unit.hooks.parameters_averaged(self.unit)

    def _average_state(self) -> None:
        """Average the state of optimizers, and take the largest of counts.

        Of codes of 8 bits and their scales, which go together, neither.
        """
        means: list[torch.Tensor] = []
        counts: list[torch.Tensor] = []
        names: list[object] = []
        for number, (parameter, key, value) in enumerate(self._state()):
            if type(value) is torch.Tensor and value.is_floating_point():
                (counts if value.dim() == 0 < parameter.dim() else means).append(value)
                names.append((number, key, value.shape, value.dtype))
            elif not isinstance(value, (int, float, str, NoneType)):
                names.append(None)
        described = sha256(repr(names).encode()).digest()
        if len(set(self._ranks.all_gather_object(described))) > 1 or None in names:
            warnings.warn(
                f"LocalSGD of {self.unit.name!r}: each rank keeps its optimizer's state, which is not"
                " floating-point tensors, or not the same ones on all ranks\n"
                "train to the end inside LocalSGD: ranks that share gradients would drift apart",
                stacklevel=4,
            )
            return
        average(means, self._ranks)
        if counts:
            largest = torch.stack([count.to(self.unit.run.device, torch.float32) for count in counts])
            for count, value in zip(counts, self._ranks.all_reduce(largest, "max"), strict=True):
                count.copy_(value)

    def _share_schedules(self) -> None:
        """Go on with schedule and learning rates of the rank with the most steps."""
        groups = [group for optimizer in self.unit.optimizers for group in optimizer.param_groups]
        rates: list[dict[str, object]] = [
            {key: value for key, value in group.items() if isinstance(value, (int, float, tuple))}
            | {key: value.cpu() for key, value in group.items() if isinstance(value, torch.Tensor)}
            for group in groups
        ]
        told = self._taken, rates, [scheduler.state_dict() for scheduler in self.unit.schedulers]
        self._taken = 0
        _, rates, states = max(self._ranks.all_gather_object(told), key=itemgetter(0))
        for scheduler, state in zip(self.unit.schedulers, states, strict=True):
            scheduler.load_state_dict(state)
        for group, values in zip(groups, rates, strict=True):
            for key, value in values.items():
                if isinstance(group.get(key), torch.Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = value

    def _state(self) -> Iterator[tuple[torch.Tensor, str, object]]:
        for optimizer in self.unit.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    state = optimizer.state.get(parameter, {})
                    yield from ((parameter, key, state[key]) for key in sorted(state, key=str))

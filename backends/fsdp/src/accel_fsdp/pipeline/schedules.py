"""One model's stages, run by torch's own schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleGPipe,
    get_schedule_class,
)
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from accel_core import AccelError, ConfigError, StepOutput
from accel_fsdp.pipeline.draws import Draws
from accel_fsdp.pipeline.reduction import Reduction
from accel_fsdp.pipeline.stages import Left, cut, points_of
from accel_fsdp.pipeline.ties import Ties
from accel_fsdp.sharding.norms import is_double
from accel_fsdp.sharding.report import weight_bytes

if TYPE_CHECKING:
    from accel_core import Leaf, Unit
    from accel_fsdp.config import FullyShardedDataParallelPlugin

__all__ = ["ForwardLoss", "Pipe"]

ForwardLoss = Callable[[nn.Module, Any], tuple[Tensor, Any]]


@frozen(eq=False)
class _Window:
    """One window of micro-batches, as the stages work on it."""

    batches: Sequence[Any]
    forward_loss: ForwardLoss
    scale: Tensor | float
    divisor: Tensor | float
    outputs: dict[int, Any]
    reduction: Reduction | None


class Pipe:
    """One model in stages, and its schedules."""

    def __init__(
        self,
        model: nn.Module,
        config: FullyShardedDataParallelPlugin,
        group: dist.ProcessGroup,
        device: torch.device,
        unit: ref[Unit],
    ) -> None:
        """Cut the model as the config says; give up the stages of other ranks.

        Raises:
            ConfigError: stages and ranks do not go together, or the model cannot be cut.
        """
        self.model, self.group, self.device, self.unit = model, group, device, unit
        self.dtype = torch.float64 if is_double(model.parameters()) else torch.float32
        """Dtype of losses, the same on all ranks."""
        self.kind, self.rank, ranks = (
            get_schedule_class(config.pp_schedule),
            dist.get_rank(group),
            group.size(),
        )
        self.single = issubclass(self.kind, PipelineScheduleSingle)
        points = points_of(model, config.pp_split_points, ranks if self.single else 2 * ranks)
        self.stages = len(points) + 1
        # Schedules with one stage per rank want as many stages as ranks, interleaved ones a multiple.
        if self.stages % ranks or (self.stages == ranks) is not self.single:
            wanted = f"{ranks} stages" if self.single else f"several times {ranks} stages"
            raise ConfigError(
                f"fsdp.pp_schedule {config.pp_schedule!r} on {ranks} ranks needs {wanted}, and"
                f" {', '.join(points)} make {self.stages}\nname other split points, or another schedule"
            )
        self.mine = range(self.rank, self.stages, ranks)
        self.last = (self.stages - 1) % ranks
        """The rank that has the last stage."""
        self.running, self.pieces = cut(model, points, self.mine)
        self.draws = self.running.draws = Draws(device, self._stream)
        self.parted = [
            (name, module)
            for name, module in model.named_modules()
            if any(point.startswith(f"{name}.") for point in points)
        ]
        """Modules in several stages."""
        self.ties = Ties(self.pieces, group, device)
        self.window: _Window | None = None
        self.is_broken = False
        """True after an exception in a window: its messages may be on their way."""
        self._schedules: dict[Any, Any] = {}

    def described(self) -> list[str]:
        """Return a line for each of this rank's stages: its modules, and the bytes of their weights."""
        lines = []
        for stage in self.mine:
            names = [piece._name for piece in self.pieces[stage]]
            held = {p: None for piece in self.pieces[stage] for p in piece.parameters()}
            lines.append(
                f"pipeline stage {stage} of 0 to {self.stages - 1}: {names[0]} to {names[-1]},"
                f" {len(names)} modules, {weight_bytes(held):,} bytes"
            )
        return lines

    def run(
        self, batches: Sequence[Any], forward_loss: ForwardLoss, scale: Tensor | None, divisor: Tensor | float
    ) -> StepOutput:
        """Forward and backward of all micro-batches, losses times `scale`.

        None: no backward. Collective.
        """
        forward_only = scale is None
        if self.is_broken:
            raise AccelError(
                "pipeline: an exception has left a window in its midst, and its stages may still wait for"
                " each other, or get what the others had sent\n"
                "end the run, and go on from a checkpoint in a new one"
            )
        self._refuse_backward_hooks()
        reduction = None if forward_only else self._reduction(len(batches))
        factor = 1.0 if scale is None else scale
        self.draws.forget()
        self.window = window = _Window(batches, forward_loss, factor, divisor, {}, reduction)
        numbers = torch.arange(len(batches))
        made = len(self._schedules)
        schedule = self._schedule(batches, forward_only)
        if forward_only and not hasattr(schedule, "eval"):
            raise AccelError(
                f"pipeline: the schedules of torch {torch.__version__} cannot evaluate (forward_only=True)\n"
                "install torch 2.9 or newer"
            )
        last = self.rank == self.last
        if not forward_only:
            self.ties.expect()
        try:
            with (
                torch.no_grad() if forward_only else nullcontext(),
                self._apart() if len(self._schedules) > made else nullcontext(),
                nullcontext() if reduction is None else reduction,
            ):
                self.is_broken = True
                (schedule.eval if forward_only else schedule.step)(
                    number=numbers, target=numbers if last else None
                )
                self.is_broken = False
        except RuntimeError as error:  # torch's words around the error of a stage
            if error.__cause__ is None:
                raise
            raise error.__cause__ from None
        finally:
            self.window = None
        return self._output(window, last)

    def _refuse_backward_hooks(self) -> None:
        for name, module in self.parted:
            if module._backward_hooks:
                raise AccelError(
                    f"pipeline: a backward hook of {name} is never called, as no stage has its inputs and"
                    " its outputs\nput the hook on modules inside it, or split the model elsewhere"
                    " (fsdp.pp_split_points)"
                )

    def _stream(self) -> AbstractContextManager[Any]:
        unit = self.unit()
        return nullcontext() if unit is None or unit.stream is None else unit.stream.drawn_from()

    def _reduction(self, microbatches: int) -> Reduction | None:
        """Reduce gradients in this rank's last backward of the window only.

        None: in each, as `sync_each_batch` asks for, or as there is one. Nor for whole ones.
        """
        unit, backwards = self.unit(), microbatches * len(self.mine)
        if unit is None or backwards == 1 or unit.run.config.accumulation.sync_each_batch:
            return None
        if unit.plugin.reduces_each(unit):
            return None
        reduction = Reduction.of(unit.models, backwards)
        return reduction if reduction.modules else None

    def _output(self, window: _Window, last: bool) -> StepOutput:
        found = [window.outputs[number] for number in range(len(window.batches))] if last else []
        losses = [loss.to(self.dtype) for loss, _ in found]
        whole = torch.empty((), dtype=self.dtype, device=self.device)
        loss = torch.stack(losses).sum() / window.divisor if last else whole
        # Only the last stage has losses.
        dist.broadcast(loss, group=self.group, group_src=self.last)
        return StepOutput(loss=loss, outputs=tuple(output for _, output in found))

    def _schedule(self, batches: Sequence[Any], forward_only: bool) -> Any:
        """Torch's schedule, which is made for one number and shape of micro-batches."""
        shapes = [
            tuple(leaf.shape for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)) for batch in batches
        ]
        if len(set(shapes)) > 1:
            raise AccelError(
                f"pipeline: the micro-batches of a window have different shapes: {shapes[0]},"
                f" {next(other for other in shapes if other != shapes[0])}\n"
                "pad them to one shape, and drop the last batch (drop_last=True)"
            )
        key = len(batches), shapes[0], forward_only
        if key not in self._schedules:
            stages = [
                PipelineStage(_Stage(self, number), number, self.stages, self.device, group=self.group)
                for number in self.mine
            ]
            self._schedules[key] = self._made(stages, len(batches))
        return self._schedules[key]

    def _made(self, stages: Sequence[PipelineStage], microbatches: int) -> Any:
        kind: Any = self.kind
        if kind is Schedule1F1B and microbatches < self.stages:
            kind = ScheduleGPipe  # there is nothing to alternate: 1F1B, too, would begin with all forwards
        try:
            return kind(stages[0] if self.single else stages, microbatches, loss_fn=_loss, scale_grads=False)
        except ValueError as error:
            raise AccelError(
                f"pipeline: {self.kind.__name__} cannot run {microbatches} micro-batches: {error}\n"
                "choose another number of micro-batches a window, or another schedule"
            ) from error

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Add gradients that were there before, afterwards.

        A schedule that learns shapes drops them.
        """
        unit = self.unit()
        parameters = () if unit is None else unit.named_parameters().values()
        held = [(each, each.grad) for each in parameters if each.grad is not None]
        for parameter, _ in held:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, before in held:
                parameter.grad = before if parameter.grad is None else parameter.grad.add_(before)

    def held(self, leaves: Mapping[str, Leaf]) -> dict[str, tuple[Leaf, int, torch.dtype]]:
        """Name -> its leaf here, the rank of the group that has it, its dtype.

        Collective.
        """
        mine = {name: leaf.shards[0][1].dtype for name, leaf in leaves.items() if leaf.shards}
        everyone: list[Any] = [None] * self.group.size()
        dist.all_gather_object(everyone, mine, group=self.group)
        owners = {name: rank for rank in reversed(range(len(everyone))) for name in everyone[rank]}
        return {name: (leaf, owners[name], everyone[owners[name]][name]) for name, leaf in leaves.items()}


def _loss(loss: Tensor, number: Tensor) -> Tensor:
    return loss.sum()


class _Stage(nn.Module):
    """The module that a schedule calls: this stage of the user's forward and loss."""

    stage: int
    pipe: Pipe
    known = False
    """True once torch knows this stage's shapes, from a first call on dummies."""

    def __init__(self, pipe: Pipe, stage: int) -> None:
        super().__init__()
        self.pieces = nn.ModuleList(pipe.pieces[stage])
        self.stage = stage
        self.pipe = pipe

    def forward(self, *received: Tensor, number: Tensor) -> Tensor:
        # Torch calls each stage once with meaningless numbers, to learn shapes; nothing of it may stay.
        if self.known:
            window = self.pipe.window
            assert window is not None
            if window.reduction is None:
                return self._run(received, int(number))
            window.reduction.wait()
            return window.reduction.watch(self._run(received, int(number)))
        self.known = True
        unit = self.pipe.unit()
        stream = None if unit is None else unit.stream
        before = None if stream is None else stream.state
        rehearsal = nullcontext() if unit is None else unit.rehearsal()
        with _without_trace(self.pipe.model, self.pipe.device), rehearsal:
            found = self._run(received, int(number))
        self.pipe.draws.forget()
        if stream is not None and before is not None:
            stream.state = before
        return found

    def _run(self, received: Sequence[Tensor], at: int) -> Tensor:
        pipe = self.pipe
        window = pipe.window
        assert window is not None
        begun = _contiguous_backward(received[0]) if received else None
        with pipe.running.at(self.stage, begun), pipe.draws.of(at):
            try:
                loss, output = window.forward_loss(pipe.model, window.batches[at])
            except Left as left:
                return left.activation.contiguous()  # torch sends no other memory order
        if self.stage + 1 < pipe.stages:
            raise AccelError(
                f"pipeline: the forward ended in stage {self.stage} of {pipe.stages}, before the next began\n"
                "forward_loss must call the model, and its forward all modules of fsdp.pp_split_points"
            )
        if isinstance(loss, DTensor):  # of logits that are left split
            loss = loss.full_tensor()
        window.outputs[at] = (loss.detach(), output)
        return (loss * window.scale / window.divisor).view(1)  # schedules concatenate them


def _contiguous_backward(received: Tensor) -> Tensor:
    """Return the received tensor, so that the gradient to be sent back is contiguous."""
    if not received.requires_grad:
        return received
    same = received.view_as(received)  # torch receives into one tensor again and again: no hook may stay
    same.register_hook(lambda gradient: gradient.contiguous())
    return same


@contextmanager
def _without_trace(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore random streams and buffers, such as batch norm's statistics."""
    held = [(each, each.clone()) for each in model.buffers() if not each.is_meta]
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type):
        yield
    for buffer, before in held:
        buffer.data.copy_(before)  # unseen by autograd, which has saved statistics that it does not use

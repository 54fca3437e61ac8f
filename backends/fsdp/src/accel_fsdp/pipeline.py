"""Pipelines: a model's stages on the ranks of dimension `pp`, run by torch's own schedules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from attrs import evolve, frozen
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

from accel_core import AccelError, ConfigError, OptimizerState, StepOutput, hooks, implements
from accel_fsdp.sharded import Sharded, whole
from accel_fsdp.stages import Left, Running, cut, points_of, ties
from accel_fsdp.wrapping import blocks, wraps

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from accel_core import Leaf, Run, RunConfig, Unit
    from accel_fsdp.config import FullyShardedDataParallelPlugin

__all__ = ["Pipelined"]

ForwardLoss = Callable[[nn.Module, Any], tuple[Tensor, Any]]


class Pipelined(Sharded):
    """As `Sharded`, of a model whose stages are on different ranks."""

    def __init__(self, config: FullyShardedDataParallelPlugin, run: Run) -> None:
        super().__init__(config, run)
        self._pipes: WeakKeyDictionary[nn.Module, Pipe] = WeakKeyDictionary()

    @implements(hooks.owns)
    def owns(self, config: RunConfig) -> Sequence[str]:
        return ["schedule"]

    @implements(hooks.transform_model)
    def transform_model(self, unit: Unit, model: nn.Module, phase: str) -> nn.Module:
        if phase == "parallelize":
            assert unit.mesh is not None
            group = unit.mesh.device_mesh.get_group("pp")
            self._pipes[model] = Pipe.of(model, self.config, group, self.run.device)
        if phase == "checkpoint" and self.config.activation_checkpointing and not blocks(model, self.config):
            if not wraps(model, self.config):
                raise ConfigError(
                    "fsdp.activation_checkpointing would compute a whole model again, of which each rank of a"
                    " pipeline runs stages\nname its blocks: fsdp.transformer_cls_names_to_wrap"
                )
            return model  # this rank's stages have none
        return super().transform_model(unit, model, phase)

    @implements(hooks.wrap_model)
    def wrap_model(self, unit: Unit, model: nn.Module) -> nn.Module:
        """Collective."""
        wrapped = super().wrap_model(unit, model)
        self._pipes[model].tie()
        return wrapped

    def counted_elsewhere(self, unit: Unit) -> Collection[nn.Parameter]:
        pipes = [self._pipes[model] for model in unit.models]
        return {tie.parameter for pipe in pipes for tie in pipe.ties if pipe.rank != tie.ranks[0]}

    # -- the step --------------------------------------------------------------------------------

    @implements(hooks.backward)
    def backward(self, unit: Unit, loss: Tensor, boundary: bool, options: Mapping[str, Any]) -> NoReturn:
        raise AccelError(
            f"unit {unit.name!r} is a pipeline, which does forward and backward in one schedule\n"
            "use accelerator.forward_backward(model, batches, forward_loss)"
        )

    @implements(hooks.forward_backward)
    def forward_backward(
        self,
        unit: Unit,
        batches: Iterator[Any],
        forward_loss: ForwardLoss,
        microbatches: int | None,
        forward_only: bool,
    ) -> StepOutput:
        """Collective. All ranks get the loss; those of the last stage also what `forward_loss` gave."""
        with unit.whole_window(batches, microbatches) as taken:
            scale, divisor = None if forward_only else self._scale(unit), unit.window.divisor
            return self._pipes[unit.models[0]].run(taken, forward_loss, scale, divisor)

    @implements(hooks.reduce_gradients)
    def reduce_gradients(self, unit: Unit, num_items: Tensor | None) -> None:
        """Collective."""
        for model in unit.models:
            self._pipes[model].sum_ties()
        self.below.reduce_gradients(unit, num_items)

    def _scale(self, unit: Unit) -> Tensor:
        """What the layers below multiply losses by, before they begin a window's backward."""
        one = torch.ones((), device=self.run.device, requires_grad=True)
        self.below.backward(unit, one, True, {})
        assert one.grad is not None
        return one.grad

    # -- state: every name on every rank, tensors where they are -----------------------------------

    @implements(hooks.model_state)
    def model_state(self, unit: Unit) -> Mapping[str, Leaf]:
        leaves = super().model_state(unit).items()
        return {name: evolve(leaf, shards=_shards(leaf)) for name, leaf in leaves}

    @implements(hooks.optimizer_state)
    def optimizer_state(self, unit: Unit, optimizer: Optimizer) -> OptimizerState:
        state, absent = super().optimizer_state(unit, optimizer), _absent(unit)
        # What a load has made for them is of the meta device, but for counters.
        leaves = {
            key: evolve(leaf, shards=()) if key.rpartition("/")[0] in absent else leaf
            for key, leaf in state.leaves.items()
        }
        return evolve(state, leaves=leaves)

    @implements(hooks.iter_weights)
    def iter_weights(
        self, unit: Unit, dtype: torch.dtype | None, to: torch.device | None
    ) -> Iterator[tuple[str, Tensor]]:
        pipe, leaves = self._pipes[unit.models[0]], self.model_state(unit)
        held, parameters = pipe.held(leaves), unit.named_parameters()  # sharded again by now
        for name, (leaf, owner, wanted) in held.items():
            if owner == pipe.rank:
                tensor = whole(parameters[name] if name in parameters else leaf.shards[0][1]).contiguous()
            else:
                tensor = torch.empty(leaf.global_shape, dtype=wanted, device=self.run.device)
            dist.broadcast(tensor, group=pipe.group, group_src=owner)
            yield name, tensor.to(to, dtype if tensor.is_floating_point() else None)

    @implements(hooks.full_parameters)
    def full_parameters(self, unit: Unit, names: Sequence[str], writeback: bool) -> NoReturn:
        raise AccelError(
            f"unit {unit.name!r} is a pipeline: no rank has the modules of all its stages\n"
            "read whole weights one by one: accelerator.iter_weights(model)"
        )


def _shards(leaf: Leaf) -> tuple[Any, ...]:
    return tuple((at, tensor) for at, tensor in leaf.shards if not tensor.is_meta)


def _absent(unit: Unit) -> set[str]:
    return {name for name, parameter in unit.named_parameters().items() if parameter.is_meta}


@frozen(eq=False)
class Tie:
    """A weight of several stages. Each of them has it; its gradient is the sum of what they find.

    ranks: of the pipeline's group, that have it.
    """

    parameter: nn.Parameter
    ranks: Sequence[int]


@frozen(eq=False)
class _Window:
    """What the stages work on."""

    batches: Sequence[Any]
    forward_loss: ForwardLoss
    scale: Tensor | float
    divisor: int
    outputs: dict[int, Any]


class Pipe:
    """One model in stages, and its schedules."""

    def __init__(
        self,
        model: nn.Module,
        kind: type[Any],
        running: Running,
        pieces: Mapping[int, Sequence[nn.Module]],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self.model, self.kind, self.running, self.pieces = model, kind, running, pieces
        self.group, self.device = group, device
        self.rank, self.stages = dist.get_rank(group), len(pieces)
        self.window: _Window | None = None
        self.ties: list[Tie] = []
        self._places = ties(pieces)
        self._summed = True
        self._schedules: dict[Any, Any] = {}

    @classmethod
    def of(
        cls,
        model: nn.Module,
        config: FullyShardedDataParallelPlugin,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> Pipe:
        """Cut the model as the config says; give up what is not this rank's.

        Raises:
            ConfigError: stages and ranks do not go together, or the model cannot be cut.
        """
        kind, ranks, rank = get_schedule_class(config.pp_schedule), group.size(), dist.get_rank(group)
        single = issubclass(kind, PipelineScheduleSingle)
        points = points_of(model, config.pp_split_points, ranks if single else 2 * ranks)
        stages = len(points) + 1
        if stages % ranks or (stages == ranks) is not single:
            wanted = f"{ranks} stages" if single else f"several times {ranks} stages"
            raise ConfigError(
                f"fsdp.pp_schedule {config.pp_schedule!r} on {ranks} ranks needs {wanted}, and"
                f" {', '.join(points)} make {stages}\nname other split points, or another schedule"
            )
        running, pieces = cut(model, points, range(rank, stages, ranks))
        return cls(model, kind, running, pieces, group, device)

    def run(
        self, batches: Sequence[Any], forward_loss: ForwardLoss, scale: Tensor | None, divisor: int
    ) -> StepOutput:
        """Forward and backward of all micro-batches, losses times `scale`; None: no backward. Collective."""
        forward_only = scale is None
        self.window = window = _Window(batches, forward_loss, 1.0 if scale is None else scale, divisor, {})
        numbers = torch.arange(len(batches))
        schedule = self._schedule(batches, forward_only)
        last = (self.stages - 1) % self.group.size() == self.rank
        self._summed &= forward_only
        try:
            with torch.no_grad() if forward_only else nullcontext():
                (schedule.eval if forward_only else schedule.step)(
                    number=numbers, target=numbers if last else None
                )
        except RuntimeError as error:  # torch's words around what a stage raised
            if error.__cause__ is None:
                raise
            raise error.__cause__ from None
        finally:
            self.window = None
        return self._output(window, last)

    # -- weights of several stages ---------------------------------------------------------------

    @torch.no_grad()
    def tie(self) -> None:
        """Once weights are sharded: begin with those of their first stages. Collective."""
        for places in self._places:
            ranks = sorted({stage % self.group.size() for stage in places})
            here = [
                place for stage in places if stage % self.group.size() == self.rank for place in places[stage]
            ]
            if not here:
                continue
            parameter = here[0][0]._parameters[here[0][1]]
            assert parameter is not None
            for module, name in chain(*places.values()):
                module._parameters[name] = parameter
            if len(ranks) > 1:
                self.ties.append(Tie(parameter, ranks))
                _local(parameter).copy_(self._everyones(parameter, ranks)[0])

    @torch.no_grad()
    def sum_ties(self) -> None:
        """Give all that have a weight the gradient that all of them have found, once a window. Collective."""
        if self._summed:
            return
        self._summed = True
        for tie in self.ties:
            weight = tie.parameter
            if weight.requires_grad:
                weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
                _local(weight.grad).copy_(torch.stack(self._everyones(weight.grad, tie.ranks)).sum(0))

    def _everyones(self, tensor: Tensor, ranks: Sequence[int]) -> list[Tensor]:
        """What each of these ranks gives, this one among them; in their order, so that sums are the same."""
        mine = _local(tensor).to(self.device).contiguous()
        given = {rank: torch.empty_like(mine) for rank in ranks if rank != self.rank}
        transfers = [
            dist.P2POp(operation, what, group=self.group, group_peer=rank)
            for rank, theirs in given.items()
            for operation, what in ((dist.isend, mine), (dist.irecv, theirs))
        ]
        for transfer in dist.batch_isend_irecv(transfers):
            transfer.wait()
        return [given.get(rank, mine) for rank in ranks]

    def _output(self, window: _Window, last: bool) -> StepOutput:
        found = [window.outputs[number] for number in range(len(window.batches))] if last else []
        losses = [loss for loss, _ in found]
        loss = torch.stack(losses).sum() / window.divisor if last else torch.empty((), device=self.device)
        dist.broadcast(loss, group=self.group, group_src=(self.stages - 1) % self.group.size())
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
            mine = range(self.rank, self.stages, self.group.size())
            stages = [
                PipelineStage(_Stage(self, number), number, self.stages, self.device, group=self.group)
                for number in mine
            ]
            self._schedules[key] = self._made(stages, len(batches))
        return self._schedules[key]

    def _made(self, stages: Sequence[PipelineStage], microbatches: int) -> Any:
        kind, single = self.kind, issubclass(self.kind, PipelineScheduleSingle)
        if kind is Schedule1F1B and microbatches < self.stages:
            kind = ScheduleGPipe  # there is nothing to alternate: 1F1B, too, would begin with all forwards
        try:
            return kind(stages[0] if single else stages, microbatches, loss_fn=_loss, scale_grads=False)
        except ValueError as error:
            raise AccelError(
                f"pipeline: {self.kind.__name__} cannot run {microbatches} micro-batches: {error}\n"
                "choose another number of micro-batches a window, or another schedule"
            ) from error

    def held(self, leaves: Mapping[str, Leaf]) -> dict[str, tuple[Leaf, int, torch.dtype]]:
        """Name -> its leaf here, the rank of the group that has it, its dtype. Collective."""
        mine = {name: leaf.shards[0][1].dtype for name, leaf in leaves.items() if leaf.shards}
        everyone: list[Any] = [None] * self.group.size()
        dist.all_gather_object(everyone, mine, group=self.group)
        owners = {name: rank for rank in reversed(range(len(everyone))) for name in everyone[rank]}
        return {name: (leaf, owners[name], everyone[owners[name]][name]) for name, leaf in leaves.items()}


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _loss(loss: Tensor, number: Tensor) -> Tensor:
    return loss.sum()


class _Stage(nn.Module):
    """What a schedule calls: the user's own forward and loss, as far as this stage goes."""

    stage: int
    pipe: Pipe
    known = False
    """Whether torch has learnt the shapes that this stage gives, by a first call with meaningless numbers."""

    def __init__(self, pipe: Pipe, stage: int) -> None:
        super().__init__()
        self.pieces = nn.ModuleList(pipe.pieces[stage])
        self.stage = stage
        self.pipe = pipe

    def forward(self, *received: Tensor, number: Tensor) -> Tensor:
        if self.known:
            return self._run(received, int(number))
        self.known = True
        with _without_trace(self.pipe.model, self.pipe.device):
            return self._run(received, int(number))

    def _run(self, received: Sequence[Tensor], at: int) -> Tensor:
        pipe = self.pipe
        window = pipe.window
        assert window is not None
        with pipe.running.at(self.stage, received[0] if received else None):
            try:
                loss, output = window.forward_loss(pipe.model, window.batches[at])
            except Left as left:
                return left.activation
        if self.stage + 1 < pipe.stages:
            raise AccelError(
                f"pipeline: the forward ended in stage {self.stage} of {pipe.stages}, before the next began\n"
                "forward_loss must call the model, and its forward all modules of fsdp.pp_split_points"
            )
        if isinstance(loss, DTensor):  # of logits that are left split
            loss = loss.full_tensor()
        window.outputs[at] = (loss.detach(), output)
        return (loss * window.scale / window.divisor).view(1)  # schedules concatenate them


@contextmanager
def _without_trace(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Random streams and buffers, such as batch norm's statistics, are afterwards as they were."""
    held = [(each, each.clone()) for each in model.buffers() if not each.is_meta]
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type):
        yield
    for buffer, before in held:
        buffer.data.copy_(before)  # unseen by autograd, which has saved statistics that it does not use

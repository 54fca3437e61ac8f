"""The prepared model: its forward runs megatron-core's schedule over a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accel_core import AccelError, StepOutput
from accel_megatron.adapters.adapter import LABELS
from accel_megatron.building import global_modules
from accel_megatron.datasets import inputs_of
from accel_megatron.library import quiet
from accel_megatron.microbatches import check_lengths, cut, shape

if TYPE_CHECKING:
    from accel_core import Unit
    from accel_megatron.adapters.adapter import Adapter
    from accel_megatron.building import Chunks
    from accel_megatron.config import Sized
    from accel_megatron.native import NativeModel

__all__ = ["Engine"]

ForwardLoss = Callable[[Any, Any], tuple[Tensor, Any]]


class _ChunkExit(BaseException):
    """Exit from the user's `forward_loss` in a stage that has no loss, with the stage's activation.

    The function goes on after `model(**batch)` with a loss, which only the last stage can compute. A
    BaseException, so that an `except Exception` of the user's function does not catch it.
    """

    def __init__(self, activation: Tensor) -> None:
        super().__init__()
        self.activation = activation


class _KnownGradients(torch.autograd.Function):
    """A loss whose gradients exist already: megatron-core's schedule runs backward inside forward.

    The program's `loss.backward()` comes later. It computes nothing, but its gradient is the factor by which
    the program has multiplied the loss after forward; the engine compares it with the scale that forward
    assumed.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, anchor: Tensor, engine: Engine) -> Tensor:  # noqa: ARG004
        """Copy the loss; autograd calls backward because `anchor` requires a gradient."""
        ctx.engine = engine
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        """Note the scale of the loss; return no gradients."""
        ctx.engine.refuse_unstepped()
        if not ctx.engine.has_gradients:
            raise AccelError(
                "megatron: zero_grad() came between forward and backward, and megatron-core has computed the"
                " gradients with the model's forward\n"
                "call zero_grad() before the forward, or after optimizer.step()"
            )
        ctx.engine.scaled = gradient
        return None, None, None


class Engine(nn.Module):
    """The prepared model.

    Attributes:
        module: the user's model, with its names, shapes and config. Its parameters are empty, because
            megatron-core has the weights.
        chunks: this rank's parts of the model, in megatron-core's form.
        adapter: converts inputs, outputs and names of the model's family.
        plugin: the options.
    """

    def __init__(
        self, module: nn.Module, chunks: Chunks, adapter: Adapter | NativeModel, plugin: Sized
    ) -> None:
        super().__init__()
        self.module = module
        self.chunks, self.adapter = chunks, adapter
        self.plugin = plugin
        self.unit: Unit | None = None
        self.scaled: Tensor | None = None
        """The gradient of the last loss in its backward: 1, times the factors that the program applied."""
        self.has_gradients = False
        """True from a forward that has computed gradients until they are cleared."""
        self._chunk: Any = None
        """The chunk that the schedule runs; None outside the schedule."""
        made = plugin.custom_train_step_class
        self.train_step: Any = None if made is None else made(plugin, **plugin.custom_train_step_kwargs)

    def train(self, mode: bool = True) -> Engine:
        """Set training mode, for the chunks too."""
        super().train(mode)
        for each in self.chunks.run:
            each.train(mode)
        return self

    def refuse_unstepped(self) -> None:
        """Raise AccelError for gradients that no optimizer sees: the user's parameters get none."""
        if self.chunks.scheduled and self.unit is not None and not self.unit.optimizers:
            raise AccelError(
                f"megatron: backward of {type(self.module).__name__}, which was prepared without an"
                " optimizer: its gradients are in megatron-core's form, and an optimizer that is not prepared"
                " steps nothing\n"
                "prepare the optimizer too: model, optimizer = accelerator.prepare(model, optimizer)"
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients, which are in buffers of megatron-core's."""
        super().zero_grad(set_to_none)
        clear = self.unit and self.unit.steps.zero_grad
        if self.unit and clear:
            for optimizer in self.unit.optimizers:
                clear(self.unit, optimizer, set_to_none)

    def own_layers(self) -> Iterator[tuple[str, nn.Module]]:
        """Modules that compute on this rank, by their names in the whole model."""
        for chunk in self.chunks.raw:
            yield from global_modules(chunk)

    @property
    def config(self) -> Any:
        """The config of the user's model."""
        return self.module.config

    @property
    def divisor(self) -> Tensor | float:
        """The number by which core divides the loss of this micro-batch."""
        assert self.unit is not None
        return 1.0 if self.unit.run.accumulation is None else self.unit.window.divisor

    @property
    def scale(self) -> Tensor | float:
        """The factor by which core multiplies the loss of this micro-batch."""
        return 1.0 / self.divisor

    def is_own(self, loss: Tensor) -> bool:
        """Return True if `loss`, after its backward, is forward's last loss, scaled as forward assumed.

        The gradients were computed with that scale, so any other factor would be lost in silence. In the
        plain case the graph of the loss tells it. Reading the scale, as in the other cases, waits for the
        device.
        """
        node: Any = loss.grad_fn
        # If core has divided the loss, the division is the node above the loss that forward returned.
        if node is not None and (isinstance(self.divisor, torch.Tensor) or self.divisor != 1):
            ((node, _), *_) = node.next_functions
        if getattr(node, "engine", None) is self:
            return True
        return self.scaled is not None and abs(float(self.scaled) - float(self.scale)) <= 1e-6

    # -- forward ---------------------------------------------------------------------------------

    def forward(self, *args: Any, **inputs: Any) -> Any:
        """Run the schedule over a batch, cut into micro-batches; inside the schedule, run one micro-batch.

        Collective. In training the schedule runs backward too, and all stages get the mean loss. In
        evaluation they also get logits, if the batch has no labels or `return_logits` is set.
        """
        if args:
            raise AccelError(
                "megatron: the model takes its inputs by name, so that stages know what is what\n"
                "call model(**batch), or model(input_ids=...)"
            )
        if self.plugin.megatron_dataset_flag and self.train_step is None:
            inputs = inputs_of(inputs)
        if self._chunk is not None:
            return self._of_chunk(inputs)
        return self._of_batch(inputs)

    def _of_chunk(self, inputs: Mapping[str, Any]) -> Any:
        chunk = self._chunk
        last = _inside(chunk).post_process
        found = self.adapter.call(chunk, inputs, last=last, logits=self.plugin.return_logits)
        if last:
            return found
        # Returning the activation would make the user's function compute a loss of it.
        raise _ChunkExit(found)

    def _of_batch(self, inputs: Mapping[str, Any]) -> Any:
        training = self.training and torch.is_grad_enabled()
        count = self.plugin.micro_batches
        batches = cut(inputs, count, exact=training)
        own = self.plugin.custom_loss_function or self.plugin.custom_get_batch_function or self.train_step
        has_loss = own or any(name in inputs for name in LABELS)
        if training and not has_loss:
            raise AccelError(
                "megatron: in training the model computes its loss itself, and the batch has no labels\n"
                "add labels, or call accelerator.forward_backward(model, batches, forward_loss)"
            )
        forward_loss = self._computed_loss if self.train_step is None else None
        found = self.run(batches, forward_loss, forward_only=not training, scale=self.scale)
        given = self._everywhere(found)
        parts = [logits for logits in given if logits is not None]
        logits = None if given[0] is None else torch.cat(parts).detach()
        if not has_loss:
            return self.adapter.make_output(None, logits)
        loss = self._shown(found.loss)
        if training:
            # The gradients exist already. The loss still needs a graph, so that loss.backward() works and the
            # scale can be checked.
            self.has_gradients = True
            anchor = torch.empty((), device=loss.device, requires_grad=True)
            loss = _with_known_gradients(loss, anchor, self)
        return self.adapter.make_output(loss, logits)

    def _shown(self, loss: Tensor) -> Tensor:
        """Return the loss that the caller sees. Collective if it is averaged."""
        if self.plugin.average_losses:
            from megatron.core import parallel_state

            readers = parallel_state.get_data_parallel_group()
            dist.all_reduce(loss, group=readers)  # gloo has no mean
            loss = loss / dist.get_world_size(readers)
        return loss

    def _computed_loss(self, model: Any, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
        """Return loss and logits of a micro-batch; the loss is zero if nothing defines one."""
        if self.plugin.custom_get_batch_function is not None:
            inputs = self.plugin.custom_get_batch_function(iter([inputs]))
        output = model(**inputs)
        loss, logits = self.adapter.compute_loss(output, inputs)
        if self.plugin.custom_loss_function is not None:
            loss = self.plugin.custom_loss_function(output, inputs)
        device = next(self.chunks.parameters()).device
        return torch.zeros((), device=device) if loss is None else loss, logits

    def _everywhere(self, found: StepOutput) -> Sequence[Tensor | None]:
        """Return the logits that the last stage gave, on all stages. Collective."""
        from megatron.core import parallel_state

        group = parallel_state.get_pipeline_model_parallel_group()
        if dist.get_world_size(group) == 1:
            return found.outputs
        source = parallel_state.get_pipeline_model_parallel_last_rank()
        # The other stages learn shapes and dtypes first, then receive each tensor.
        told: list[Any] = [[None if each is None else (each.shape, each.dtype) for each in found.outputs]]
        dist.broadcast_object_list(told, source, group=group)
        device = found.loss.device
        outputs = found.outputs or [
            None if each is None else torch.empty(each[0], dtype=each[1], device=device) for each in told[0]
        ]
        for output in outputs:
            if output is not None:
                dist.broadcast(output, source, group=group)
        return outputs

    # -- the schedule -----------------------------------------------------------------------------

    def run(
        self,
        batches: Sequence[Any],
        forward_loss: ForwardLoss | None,
        *,
        forward_only: bool,
        scale: Tensor | float = 1.0,
    ) -> StepOutput:
        """Run forward and backward of micro-batches by megatron-core's schedule. Collective.

        Args:
            batches: the micro-batches of this rank's reader.
            forward_loss: (model, batch) -> (loss, output); None: the step of custom_train_step_class.
            forward_only: without backward.
            scale: the factor of the gradients, by which core multiplies the loss after forward.

        Returns:
            The mean loss, on all ranks, and on the last stage the outputs of `forward_loss`.
        """
        with quiet():
            from megatron.core import parallel_state
            from megatron.core.pipeline_parallel import get_forward_backward_func
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        if len(batches) < stages and not forward_only:
            raise AccelError(
                f"megatron: {len(batches)} micro-batch(es) for {stages} stages, most of which would idle\n"
                f"give at least one micro-batch per stage: num_micro_batches, or microbatches={stages}"
            )
        if not forward_only:
            self._refuse_begun()
        size, sequence = shape(batches, stages)
        if forward_loss is None:  # reads a batch as it likes
            sequence = self.plugin.seq_length or self.plugin.encoder_seq_length or sequence
        else:
            check_lengths(self.plugin, batches)
        chunks, asked = self.chunks.run, len(batches)
        # The interleaved schedule takes at least one micro-batch per stage. In evaluation the last one is
        # repeated, and the results of the repetitions are cut off.
        if len(chunks) > 1 and asked < stages:
            batches = [*batches, *[batches[-1]] * (stages - asked)]
        # Each chunk of interleaved stages reads all micro-batches.
        iterators: list[Iterator[Any]] = [iter(batches) for _ in chunks]
        with torch.set_grad_enabled(not forward_only), self.silence():
            found = get_forward_backward_func()(
                forward_step_func=(
                    self._own_step(scale) if forward_loss is None else self._step(forward_loss, scale)
                ),
                data_iterator=iterators if len(chunks) > 1 else iterators[0],
                model=chunks if len(chunks) > 1 else chunks[0],
                num_microbatches=len(batches),
                seq_length=sequence,
                micro_batch_size=size,
                forward_only=forward_only,
            )[:asked]
        # Only the last stage has losses; the other stages receive the mean into an empty tensor.
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        device = next(self.chunks.parameters()).device
        loss = torch.stack([each for each, _ in found]).mean() if last else torch.empty((), device=device)
        if stages > 1:
            source = parallel_state.get_pipeline_model_parallel_last_rank()
            dist.broadcast(loss, source, group=parallel_state.get_pipeline_model_parallel_group())
        return StepOutput(loss=loss, outputs=tuple(output for _, output in found))

    @contextmanager
    def silence(self) -> Iterator[None]:
        """Keep gradients unreduced in a backward before the last micro-batch of a window.

        With overlap_grad_reduce the schedule reduces in the last micro-batch of each call. A window of
        several calls must reduce in the last call alone, because a reduced buffer cannot be added to.
        """
        config = self.chunks.config
        noisy = config.no_sync_func
        if noisy is None or self.unit is None or self.unit.window.boundary:
            yield
            return
        # The schedule would leave no_sync for the last micro-batch of this call, and start to reduce: hide
        # the functions from it, and hold no_sync around the whole call.
        reducing = config.grad_sync_func
        config.no_sync_func = config.grad_sync_func = None
        try:
            with ExitStack() as stack:
                for chunk in self.chunks.run:
                    stack.enter_context(chunk.no_sync())
                yield
        finally:
            config.no_sync_func, config.grad_sync_func = noisy, reducing

    def _refuse_begun(self) -> None:
        """Refuse a backward that would add to gradients while these are reduced."""
        begun = (g.grad_reduce_handle or g.per_param_grad_ready_counts for g in self.chunks.bucket_groups())
        if self.chunks.config.no_sync_func is not None and any(begun):
            raise AccelError(
                "megatron: backward came after another one without optimizer.step() and zero_grad() in"
                " between, and with overlap_grad_reduce the first has begun to reduce gradients already\n"
                "run both in one window (accelerator.accumulate, forward_backward), or leave"
                " overlap_grad_reduce out"
            )

    def _step(self, forward_loss: ForwardLoss, scale: Tensor | float) -> Callable[[Iterator[Any], Any], Any]:
        def step(batches: Iterator[Any], chunk: Any) -> Any:
            batch = next(batches)
            self._chunk = chunk
            try:
                loss, output = forward_loss(self, batch)
            except _ChunkExit as left:  # a stage before the last: the schedule sends the activation on
                return left.activation, None
            finally:
                self._chunk = None
            if not _inside(chunk).post_process:
                raise AccelError(
                    "megatron: forward_loss returned in a stage that has no loss\n"
                    "it must call the model it is given, with the inputs of a micro-batch by name"
                )
            # The schedule divides the loss in place by the number of micro-batches, so the user's loss is
            # multiplied into a new tensor, and the reported loss is a copy.
            return loss.float() * scale, lambda scaled: (scaled, (loss.detach().float(), output))

        return step

    def _own_step(self, scale: Tensor | float) -> Callable[[Iterator[Any], Any], Any]:
        def step(batches: Iterator[Any], chunk: Any) -> Any:
            output, judge = self.train_step.forward_step(batches, chunk)

            def judged(output: Any) -> Any:
                loss, told = judge(output)
                return loss.float() * scale, (loss.detach().float(), told.get("logits"))

            return output, judged

        return step


_with_known_gradients: Callable[[Tensor, Tensor, Engine], Tensor] = _KnownGradients.apply


def _inside(chunk: Any) -> Any:
    while not hasattr(chunk, "post_process"):
        chunk = chunk.module
    return chunk

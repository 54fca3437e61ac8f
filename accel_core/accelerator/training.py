"""The Accelerator's methods for the training step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from accel_core.data.uneven import check_unit
from accel_core.defaults.precision import autocast
from accel_core.errors import AccelError
from accel_core.training import step
from accel_core.training.accumulation import Accumulation, units_of

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from accel_core.contract.config import AutocastKwargs
    from accel_core.contract.unit import StepOutput, Unit
    from accel_core.contract.window import Window
    from accel_core.runtime.run import Run
    from accel_core.training.windows import CountedWindow


class Training:
    """Base of Accelerator, which holds the `run`."""

    run: Run
    _accumulations: dict[tuple[nn.Module, ...], Accumulation]
    """Models -> the context of `accumulate(*models)`, made once since every micro-batch enters it."""

    @property
    def window(self) -> Window:
        """The window of the innermost `accumulate`; outside of `accumulate`, the window of the last one."""
        return self.run.window

    @property
    def sync_gradients(self) -> bool:
        """True if the current micro-batch is the last of its window.

        Settable before the micro-batch's forward, for the units of the innermost or last `accumulate`. Before
        the first `accumulate` it is set for all units.
        """
        windows = self.run.windows
        return windows[-1].boundary if windows else self.run.window.boundary

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        for window in self.run.windows or [self.run.window, *(unit.window for unit in self.run.units)]:
            window.mark_last(value)
        if self.run.accumulation is not None:
            self.run.accumulation.follow_windows()

    def accumulate(self, *models: nn.Module, batch: Any = None) -> Accumulation:
        """Return the context of one micro-batch in the windows of these models' units.

        Inside, `backward` divides the loss by the window's size, and `step`, `zero_grad`, clipping and
        schedulers act only at the window's boundary: the last micro-batch of the window or of the loader.

        For batches of any lengths, and for short last windows, see `windows`. Entering the context is not
        collective; all ranks enter it for each of their micro-batches.

        Args:
            models: prepared models; default: all.
            batch: the micro-batch, for extensions that wrap its forward and backward. If several loaders are
                iterated and this is the unchanged batch of a loader, the end of that loader ends the window.

        Raises:
            AccelError: a model is not prepared; the context is entered inside a window of the same models;
                or, on exit, a window of the same models was entered inside.
        """
        try:  # `get` would be one more call in each micro-batch
            accumulation: Accumulation | None = self._accumulations[models]
        except (KeyError, TypeError):  # new models; or a list of models, which Accumulation refuses
            accumulation = None
        if accumulation is None:
            accumulation = self._accumulations[models] = Accumulation(self.run, models)
        return accumulation if batch is None else accumulation.for_batch(batch)

    def windows(
        self,
        batches: Iterable[Any],
        *models: nn.Module,
        items: Callable[[Any], Tensor | float] | None = None,
        size: int | None = None,
    ) -> Iterator[CountedWindow]:
        """Yield windows of batches that are counted before they are trained on.

        Each window is an iterable of its micro-batches and enters `accumulate(*models)` for each of them.
        Inside the loop `backward` divides the loss:

        - without `items`, by the number of micro-batches in the window, also in a short last window;
        - with `items`, by the number of items in the window on all ranks. The loss must be the *sum* over
          items; training then equals one process on the whole batch, for batches of any lengths. Gradients
          of a window without items are 0.

        The loss is divided at once, so that gradients may be clipped and edited as usual. A window may be
        iterated again, for example for a second model. A window ends with `batches`, not with the loader of
        an outer loop. Leaving a window early drops its gradients. `forward_backward` accepts a window.

        Call it on all ranks, with equally many batches: one small collective per window.

        Args:
            batches: a prepared loader, or any iterable of batches. Batches of a prepared loader stay where
                workers put them until they are handed out; the loader's position follows the last handed out.
            models: prepared models; default: all of the run.
            items: function of a batch -> number of its items on this rank, such as tokens with a label. A
                number on a device is not copied to the host.
            size: micro-batches per window. Default: gradient_accumulation_steps.

        Raises:
            AccelError: a model is not prepared; ranks have different numbers of batches; or `items` is used
                inside `join_uneven_inputs`, LocalSGD or `no_sync`.
        """
        from accel_core.training.windows import windows  # late: start-up need not wait for it

        return windows(Accumulation(self.run, models), batches, items, size)

    def maybe_context_parallel(
        self,
        buffers: Sequence[Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: Collection[Tensor] | None = None,
    ) -> AbstractContextManager[Any]:
        """Return a context in which `buffers` hold only this rank's parts of the sequences.

        Enter it around forward and backward, for batches that the loader leaves whole. If no ranks share
        sequences, the context does nothing.

        Args:
            buffers: tensors with a sequence dimension: ids, labels, positions. Changed in place.
            buffer_seq_dims: the sequence dimension of each buffer.
            no_restore_buffers: buffers that need not be made whole again afterwards.
        """
        context: AbstractContextManager[Any] = self.run.hooks.share_sequences(
            buffers or (), buffer_seq_dims or (), no_restore_buffers or ()
        )
        return context

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which gradients of this model are not reduced.

        `accumulate` enters it by itself. A step inside applies the gradients of this rank alone.

        Raises:
            AccelError: the model is not prepared.
        """
        (unit,) = units_of(self.run, [model])
        _, number = unit.run.prepared.place_of(model)
        return unit.without_reduction([unit.wrapped[number]])

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Return the stack's autocast context, for code outside a prepared model's forward.

        Args:
            autocast_handler: settings to use instead of the run's.
        """
        return autocast(self.run, autocast_handler)

    def backward(self, loss: Tensor, model: nn.Module | None = None, **options: Any) -> None:
        """Compute the gradients of `loss` (0-dim).

        Inside `accumulate` and `windows` the loss is first divided by the window's micro-batches or items.

        Args:
            loss: a loss computed by prepared models.
            model: the model of this loss; needed only if several strategies run their own backward.
            options: arguments of torch's backward: retain_graph, create_graph, inputs.

        Raises:
            AccelError: the loss requires no gradient, or `model` is needed but missing.
        """
        unit = None if model is None else units_of(self.run, [model])[0]
        step.backward(self.run, loss, unit, options)

    def clip_grad_norm_(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2
    ) -> Tensor | None:
        """Unscale the gradients, then clip them to this norm over the whole model.

        Call it on all ranks: ranks that hold parts of the model sum their norms, which is collective.

        Args:
            parameters: the parameters of one prepared model, or of models that share an optimizer.
            max_norm: the largest total norm.
            norm_type: 2, any other p, or inf.

        Returns:
            The total norm before clipping (0-dim), or None inside a window.

        Raises:
            AccelError: the parameters belong to several units or to no unit; or the strategy cannot clip
                with these arguments.
        """
        unit, owned = self._owner(parameters)
        return step.clip_norm(unit, owned, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """Unscale the gradients, then clamp each to [-clip_value, clip_value]. Does nothing inside a window.

        Raises:
            AccelError: the parameters belong to several units or to no unit; or the strategy cannot clamp.
        """
        unit, owned = self._owner(parameters)
        step.clip_value(unit, owned, clip_value)

    def unscale_gradients(self, optimizer: Optimizer | Sequence[Optimizer] | None = None) -> None:
        """Divide gradients by the loss scale now, to read or change them before the step. Call on all ranks.

        Args:
            optimizer: a prepared optimizer, or a list. Default: all. Other optimizers of the same unit are
                unscaled too.

        Raises:
            AccelError: an optimizer is not prepared.
        """
        prepared = self.run.prepared
        units = prepared.trained
        if optimizer is not None:
            listed = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
            proxies = [prepared.proxy_of(each) for each in listed]
            if None in proxies:
                raise AccelError(
                    "unscale_gradients: this run has not prepared this optimizer\n"
                    "give what accelerator.prepare(...) returned, or nothing for all optimizers"
                )
            units = [unit for unit in units if any(proxy.unit is unit for proxy in proxies)]
        for unit in units:
            if unit.window.boundary and unit.step_state.has_custom_step:  # torch's own step needs nothing
                step.finish(unit)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """True if any optimizer skipped its last step because gradients overflowed under a loss scale."""
        return any(proxy.step_was_skipped for _, proxy in self.run.prepared.optimizers)

    def forward_backward(
        self,
        model: nn.Module,
        batches: Iterable[Any] | CountedWindow,
        forward_loss: Callable[[nn.Module, Any], tuple[Tensor, Any]],
        *,
        microbatches: int | None = None,
        forward_only: bool = False,
    ) -> StepOutput:
        """Run forward and backward of one window. Strategies that own the schedule train only by this method.

        Call it on all ranks.

        Args:
            model: a prepared model.
            batches: an iterable, of which `microbatches` batches are taken; or a window of `windows`.
            forward_loss: (model, batch) -> (0-dim loss, anything).
            microbatches: default: gradient_accumulation_steps, or the strategy's own option.
            forward_only: no gradients and no backward, for evaluation.

        Returns:
            The loss of all micro-batches together (0-dim, detached), and the second result of `forward_loss`
            for each micro-batch. `valid` is False on pipeline ranks that have no loss.

        Raises:
            AccelError: the model is not prepared.
            StopIteration: there are too few batches; the batches taken are dropped without being computed.
        """
        window_size = None
        if (whole := getattr(batches, "whole", None)) is not None:
            batches, microbatches, window_size = whole()
        self.run.require_alive()
        (unit,) = units_of(self.run, [model])
        self.run.windows = (unit.window,)
        if self.run.world.size > 1:
            check_unit(self.run, unit, "forward" if forward_only else "backward", trains=not forward_only)
        return step.run_window(
            unit,
            batches,
            _for_model(unit, model, forward_loss),
            microbatches=microbatches,
            forward_only=forward_only,
            window_size=window_size,
        )

    @contextmanager
    def join_uneven_inputs(
        self, joinables: Sequence[nn.Module], even_batches: bool | None = None
    ) -> Iterator[None]:
        """Return a context in which ranks may run out of batches at different times. Enter it on all ranks.

        Args:
            joinables: prepared models.
            even_batches: replaces the option `data.even_batches` for prepared loaders of map-style data.

        Raises:
            ConfigError: the strategy of a model does not support uneven inputs.
            AccelError: the context is entered inside LocalSGD.
        """
        units = units_of(self.run, joinables)
        with ExitStack() as stack:
            if even_batches is not None:
                for loader in self.run.prepared.loaders:
                    stack.enter_context(loader.padding(even=even_batches))
            for strategy in dict.fromkeys(unit.strategy for unit in units):
                of_one = [unit for unit in units if unit.strategy == strategy]
                stack.enter_context(of_one[0].hooks.join(of_one, even_batches))
            for unit in units:
                stack.enter_context(unit.step_state.uneven_inputs())
            yield

    def _owner(self, parameters: Tensor | Iterable[Tensor]) -> tuple[Unit, list[Any]]:
        listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if self.run.ended:
            self.run.require_alive()
        units = self.run.prepared.units_of(listed)
        if len(units) == 1:
            (unit,) = units
            if unit is not None:
                return unit, listed
        names = sorted("no unit" if unit is None else unit.name for unit in units)
        raise AccelError(
            f"clipping: these {len(listed)} parameters belong to {', '.join(names) or 'no unit'}; one call"
            " clips the parameters of one prepared model, after its backward\n"
            "pass model.parameters() of a model that was prepared; prepare a changed model again"
        )


def _for_model(
    unit: Unit, model: nn.Module, forward_loss: Callable[[nn.Module, Any], tuple[Tensor, Any]]
) -> Callable[[nn.Module, Any], tuple[Tensor, Any]]:
    """Return `forward_loss` for this model: strategies pass the first model of the unit."""
    _, number = unit.run.prepared.place_of(model)
    wrapped, first = unit.wrapped[number], unit.wrapped[0]

    def for_model(given: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        return forward_loss(given if wrapped is first else wrapped, batch)

    return for_model

"""The part of the Accelerator about the training step."""

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
    """Made once for a set of models."""

    @property
    def window(self) -> Window:
        """The window of the innermost `accumulate`, or of the last one."""
        return self.run.window

    @property
    def sync_gradients(self) -> bool:
        """True if the current micro-batch is its window's last.

        Settable before its forward: for the units of the innermost `accumulate`, or of the last one; for
        all before the first.
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
        """Give the context of one micro-batch.

        It belongs to the windows of these models' units, by default of all.

        Inside, `backward` divides the loss by the window's size, and `step`, `zero_grad`, clipping
        and schedulers act at the window's boundary only: its last micro-batch, or the loader's.

        Args:
            models: prepared.
            batch: the micro-batch, for extensions that work around its forward and backward. If it is as a
                loader gave it, and several loaders are iterated, that loader's end ends the window.

        For batches of any lengths, and for short last windows, see `windows`. Not collective by itself; all
        ranks enter it for each of their micro-batches.

        Raises:
            AccelError: a model is not prepared; it stands inside a window of the same models; or, when it is
                left, one of the same models was entered inside.
        """
        try:  # `get` would be one more call in each micro-batch
            accumulation: Accumulation | None = self._accumulations[models]
        except (KeyError, TypeError):  # new models; a list of them, which is refused below
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
        """Give windows of batches that are counted before they are trained on, one after another.

        Each window is an iterable of its micro-batches, which enters what `accumulate(*models)` enters.
        Inside its loop `backward` divides the loss:

        - without `items` by the window's number of micro-batches, which in a short last window is its own;
        - with `items` by the items of the window on all ranks. The loss is their *sum*, and training is that
          of one process on the whole batch, for batches of any lengths. Without any item gradients are 0.

        It is divided at once, so that gradients may be clipped and edited as ever. A window may be iterated
        again, as for a second model; it ends with `batches`, and not with the loader of an outer loop. One
        that is left early drops its gradients. `forward_backward` takes a window as its batches.

        Args:
            batches: a prepared loader, or any iterable of batches. A prepared loader's stay where its workers
                put them until they are handed out, and its position is that of the batch handed out last.
            models: prepared; by default all of the run.
            items: function of a batch -> its items on this rank, such as tokens that count. A number on a
                device is not read.
            size: micro-batches of a window. Default: gradient_accumulation_steps.

        On all ranks, with as many batches each: one small collective a window.

        Raises:
            AccelError: a model is not prepared; a result of `items` is negative, nan or no number; ranks have
                different numbers of batches; or `items` inside `join_uneven_inputs` or LocalSGD.
        """
        from accel_core.training.windows import windows  # late: start-up need not wait for it

        return windows(Accumulation(self.run, models), batches, items, size)

    def maybe_context_parallel(
        self,
        buffers: Sequence[Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: Collection[Tensor] | None = None,
    ) -> AbstractContextManager[Any]:
        """Make `buffers` hold this rank's parts of sequences inside a context.

        It stands around forward and backward, where ranks share sequences.

        For batches that the loader leaves whole. Nothing happens where no ranks share sequences.

        Args:
            buffers: whatever has a sequence: ids, labels, positions. Changed in place.
            buffer_seq_dims: the sequence dimension of each.
            no_restore_buffers: those that may stay parts afterwards.
        """
        context: AbstractContextManager[Any] = self.run.hooks.share_sequences(
            buffers or (), buffer_seq_dims or (), no_restore_buffers or ()
        )
        return context

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Give a context in which gradients of this model are not reduced.

        `accumulate` does it by itself. A step inside it applies gradients of this rank alone.

        Raises AccelError for a model that is not prepared.
        """
        (unit,) = units_of(self.run, [model])
        _, number = unit.run.prepared.place_of(model)
        return unit.without_reduction([unit.wrapped[number]])

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Return the stack's autocast, for code outside a prepared model's forward.

        `autocast_handler`: other settings than the run's, within the context.
        """
        return autocast(self.run, autocast_handler)

    def backward(self, loss: Tensor, model: nn.Module | None = None, **options: Any) -> None:
        """Compute the gradients of `loss` (0-dim).

        Inside `accumulate` and `windows` it is divided first, by the window's micro-batches or items.

        Args:
            loss: from the forward of prepared models.
            model: whose loss this is; needed only where several strategies do their own backward.
            options: for torch: retain_graph, create_graph, inputs.

        Raises:
            AccelError: the loss requires no gradient, or `model` is needed.
        """
        unit = None if model is None else units_of(self.run, [model])[0]
        step.backward(self.run, loss, unit, options)

    def clip_grad_norm_(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2
    ) -> Tensor | None:
        """Clip the gradients, after unscaling, to this norm over the whole model.

        On all ranks: where they share the model's parts they sum their norms, collectively.

        Args:
            parameters: of one prepared model, or of several that one optimizer has made a unit.
            max_norm: the total norm that stays.
            norm_type: 2, any other p, or inf.

        Returns the total norm before clipping (0-dim), or None inside a window.

        Raises:
            AccelError: the parameters are of several units, or of none; or the strategy cannot clip so.
        """
        unit, owned = self._owner(parameters)
        return step.clip_norm(unit, owned, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """Clamp each gradient to [-clip_value, clip_value], after unscaling.

        Nothing happens inside a window.

        Raises:
            AccelError: the parameters are of several units, or of none; or the strategy cannot clamp them.
        """
        unit, owned = self._owner(parameters)
        step.clip_value(unit, owned, clip_value)

    def unscale_gradients(self, optimizer: Optimizer | Sequence[Optimizer] | None = None) -> None:
        """Divide gradients by the loss scale now, before the step.

        To look at them or change them. On all ranks.

        optimizer: one that is prepared, or several; default: all. Those of its unit go with it.

        Raises:
            AccelError: one is not prepared.
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
            if unit.window.boundary and unit.step_state.has_custom_step:  # a step is more than torch's
                step.finish(unit)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """True if any optimizer skipped its last step: overflow under a loss scale."""
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
        """Run forward and backward of one window.

        Where the strategy owns the schedule, this is the only form.

        Args:
            model: prepared.
            batches: `microbatches` of them are taken; or one of `windows`, with what it has counted.
            forward_loss: (model, batch) -> (0-dim loss, anything).
            microbatches: default: gradient_accumulation_steps, or what an option of the strategy says.
            forward_only: no gradients and no backward, for evaluation.

        On all ranks. Returns the loss of the micro-batches together (0-dim, detached) and what `forward_loss`
        gave beside it, one each; `valid` is False on ranks that see neither (pipelines).

        Raises:
            AccelError: the model is not prepared.
            StopIteration: there are fewer batches. None of them is computed then: they are dropped.
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
        """Give a context in which ranks may run out of batches at different times.

        On all ranks.

        Args:
            joinables: prepared models.
            even_batches: what prepared loaders of map-style data do inside, instead of what is configured.

        Raises:
            ConfigError: their strategy cannot.
            AccelError: inside LocalSGD.
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
    """Return `forward_loss` for this model: strategies call it with the unit's first."""
    _, number = unit.run.prepared.place_of(model)
    wrapped, first = unit.wrapped[number], unit.wrapped[0]

    def for_model(given: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        return forward_loss(given if wrapped is first else wrapped, batch)

    return for_model

"""Windows, clipping and metrics, by Accelerate's rules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

import accel_core
from accel_compat.accelerator.assigned import Assignable
from accel_compat.accelerator.following import Followers, Following
from accel_compat.notices import warn_once
from accel_compat.state.operations import all_tensors, recursively_apply
from accel_compat.unsupported import NotServedError
from accel_core import AccelError, ops

# Found once: in each step super() would look through all classes in between.
_accumulate, _backward = accel_core.Accelerator.accumulate, accel_core.Accelerator.backward
_clip_grad_norm_ = accel_core.Accelerator.clip_grad_norm_
_EMPTY = "the iterable of parameters is empty (a generator that was used up?); nothing is clipped"


class Stepping(Assignable):
    """An Accelerator's step, and what is gathered from one."""

    _followers: Followers

    @property
    def step(self) -> int:
        """Micro-batches that `accumulate` has counted since its loader began. Settable."""
        return self._count

    @step.setter
    def step(self, count: int) -> None:
        self._count = count
        for window in (self.run.window, *(unit.window for unit in self.run.units)):
            inside = count % self.run.accumulation_steps
            window.move_to(inside - 1)

    def accumulate(self, *models: Any, batch: Any = None) -> Any:
        """Return a context for one micro-batch of a window.

        Models that are not prepared are left out. If none is left, all prepared models take part. Optimizers
        of models that are never named step at the end of this window too.
        """
        self._count = self._next_count()
        try:
            accumulation = self._accumulations[models]
        except (KeyError, TypeError):  # not entered yet; a list of models
            models = self._named(models)
            accumulation = _accumulate(self, *models)
        if batch is not None:
            accumulation = _accumulate(self, *models, batch=batch)
        if not models:
            if not self.run.units:
                self.step = self._count
        elif followers := self._followers.units:
            return Following(accumulation, followers)
        return accumulation

    def _named(self, given: Iterable[Any]) -> tuple[Any, ...]:
        """Return the prepared ones of these models, which count for themselves."""
        several = (each if isinstance(each, (list, tuple)) else [each] for each in given)
        is_prepared = self.run.prepared.unit_of_model
        models = tuple(model for each in several for model in each if is_prepared(model) is not None)
        if models:
            self._followers.name(self.run, models)
        return models

    @contextmanager
    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> Iterator[None]:
        """Give a context in which ranks may have unequally many batches. All ranks.

        Models that are not prepared are left out: they wait for no other rank.
        """
        mine = [model for model in joinables if self.run.prepared.unit_of_model(model) is not None]
        if len(mine) < len(joinables):
            warn_once("join_uneven_inputs: has no effect on a model that is not prepared")
        with super().join_uneven_inputs(mine, even_batches):
            yield

    def _next_count(self) -> int:
        """Return the number of the next micro-batch.

        It is 0 for a loader's last one, which ends its window.
        """
        state, begun = self.gradient_state, self.run.active_loaders
        ended = state.end_of_dataloader if state._begun else bool(begun) and begun[-1].last
        return 0 if ended and state.sync_with_dataloader else self._count + 1

    def _do_sync(self) -> None:
        self.step = self._next_count()

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:  # type: ignore[override]
        """Compute gradients of the loss divided by `gradient_accumulation_steps`.

        The division happens outside of `accumulate` too.
        """
        run = self.run
        if run.accumulation_steps > 1 and (run.accumulation is None or not run.units):
            loss = loss / run.accumulation_steps
        if not kwargs:
            _backward(self, loss)
            return
        if "learning_rate" in kwargs:
            self.lomo_backward(loss, kwargs["learning_rate"])
        kwargs.pop("scale_wrt_gas", None)  # of DeepSpeed's engine, which never scales here
        _backward(self, loss, **kwargs)

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        """Refused: LOMO optimizers are not served."""
        raise NotServedError("lomo_backward: LOMO optimizers are not served\ntake another optimizer")

    # -- clipping ----------------------------------------------------------------------------------

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clip all parameters to a norm; return the norm before.

        Inside a window nothing is clipped, and it is the norm of what there is on this rank.
        """
        mine = _listed(parameters)
        try:
            norm = _clip_grad_norm_(self, mine, max_norm, norm_type)
        except AccelError as error:
            if self._may_clip("clip_grad_norm_", mine, error):
                return torch.nn.utils.clip_grad_norm_(mine, max_norm, norm_type)
            norm = None
        if norm is not None:
            return norm
        return torch.nn.utils.get_total_norm([each.grad for each in mine if each.grad is not None], norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clamp each gradient at the end of a window."""
        mine = _listed(parameters)
        try:
            super().clip_grad_value_(mine, clip_value)
        except AccelError as error:
            if self._may_clip("clip_grad_value_", mine, error):
                torch.nn.utils.clip_grad_value_(mine, clip_value)

    def _may_clip(self, name: str, parameters: list[Any], error: AccelError) -> bool:
        """Unscale parameters that core refused, as they are not those of one unit.

        Returns False inside a window, and where there are none. Raises any other error.
        """
        units = getattr(error, "units", None)
        if units is None:
            raise error
        if not parameters:
            warn_once(f"{name}: {_EMPTY}")
        if not parameters or not all(unit is None or unit.window.boundary for unit in units):
            return False
        divided = self.distributed_type in self._divided or self.run.mesh is not None
        if divided or any(unit is not None and unit.mesh is not None for unit in units):
            names = ", ".join(sorted("no unit" if unit is None else unit.name for unit in units))
            raise AccelError(
                f"clipping: these {len(parameters)} parameters belong to {names}, and ranks hold parts of"
                " them\nclip the parameters of each prepared model in a call of its own"
            )
        self.unscale_gradients([proxy for _, proxy in self.run.prepared.optimizers if proxy.unit in units])
        return True

    # -- metrics -----------------------------------------------------------------------------------

    # Accelerate's has no `gradients`; accel_core.ops.gather does.
    def gather(self, tensor: Any) -> Any:  # type: ignore[override]
        """Concatenate over all ranks. Collective."""
        return super().gather(tensor) if self.use_distributed else tensor

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather, and cut to the number of samples that the loader's last round has.

        Collective. Objects are joined item by item; a process that is alone gets its input back.
        """
        as_objects = use_gather_object or not all_tensors(input_data)
        real_readers = self.run.active_loaders[-1].real_readers if self.run.active_loaders else -1
        if not self.use_distributed:
            found = input_data
        elif as_objects:
            of_ranks = ops.gather_object([input_data], run=self.run)
            found = _joined(of_ranks[: real_readers if real_readers >= 0 else None])
        else:
            found = super().gather_for_metrics(input_data)
        length = self._samples()
        if length < 0 or real_readers >= 0:
            return found
        try:
            return found[:length] if as_objects else recursively_apply(lambda each: each[:length], found)
        except (IndexError, KeyError, TypeError):  # there is nothing in it to count, as of a number
            return found

    def _samples(self) -> int:
        """Count the last round's real samples over all ranks; -1 if unknown or all."""
        known = self.run.active_loaders[-1].remainder if self.run.active_loaders else -1
        state = self.gradient_state
        ended = state.end_of_dataloader and state.remainder > 0
        return known if known >= 0 else state.remainder if ended else -1


class LocalSGD(accel_core.LocalSGD):
    """A context in which ranks step alone, and average weights now and then."""

    def step(self) -> None:
        """Count a call, micro-batches too; average after each `local_sgd_steps` of them.

        Collective when it averages.
        """
        if self.enabled and not self.unit.window.boundary:
            self.count()
        super().step()


def _listed(parameters: Any) -> list[Any]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def _joined(each: list[Any]) -> list[Any]:
    try:
        return [item for given in each for item in given]
    except TypeError:  # numbers, None: one of each rank
        return each

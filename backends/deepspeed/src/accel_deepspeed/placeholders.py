"""Placeholders for the optimizer and scheduler that DeepSpeed makes by its JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["DummyOptim", "DummyScheduler", "EngineScheduler"]


class DummyOptim:
    """Stands for the JSON's `optimizer`; its values fill in the keys that are "auto" there.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        weight_decay: weight decay.
        kwargs: other parameters of the optimizer, such as betas.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 0.001, weight_decay: float = 0, **kwargs: Any
    ) -> None:
        listed = list(params)
        groups = listed if listed and isinstance(listed[0], dict) else [{"params": listed}]
        self.params, self.lr, self.weight_decay, self.kwargs = listed, lr, weight_decay, kwargs
        self.param_groups = [{**group, "params": list(group["params"])} for group in groups]
        self.state: dict[Any, Any] = {}

    @property
    def parameters(self) -> list[Any]:
        """Parameters of DeepSpeed's optimizer: groups if given, else parameters."""
        grouped = self.params and isinstance(self.params[0], dict)
        return self.param_groups if grouped else list(self.param_groups[0]["params"])


class DummyScheduler:
    """Placeholder for the JSON's `scheduler`, or for one made with its optimizer.

    Args:
        optimizer: the DummyOptim, or optimizer, whose rate it sets.
        total_num_steps: optimizer steps of the whole training, for `total_num_steps: auto`.
        warmup_num_steps: optimizer steps of the warmup.
        lr_scheduler_callable: makes a scheduler of an optimizer; in place of the JSON's.
        kwargs: other parameters of the scheduler.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer, self.total_num_steps, self.kwargs = optimizer, total_num_steps, kwargs
        self.warmup_num_steps, self.lr_scheduler_callable = warmup_num_steps, lr_scheduler_callable


class EngineScheduler:
    """A scheduler that DeepSpeed's engine steps by itself.

    Another call of `step` does nothing.
    """

    def __init__(self, scheduler: Any, optimizer: Any) -> None:
        self.scheduler, self.optimizer = scheduler, optimizer

    def step(self) -> None:
        """Nothing: the engine has done it."""

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # not set yet: an object being copied
            raise AttributeError(name)
        return getattr(self.scheduler, name)

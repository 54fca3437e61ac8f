"""A small contract with a hook of each kind and answer, so that tests need not follow the real one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from accel_core.contract.hooks import everyone, everyone_per_step, observer, owner, owner_per_step, wrapper


@owner
def decide(unit: str, options: Mapping[str, Any]) -> str | None: ...


@owner_per_step
def backward(unit: str, loss: float, boundary: bool) -> None: ...


@everyone
def variables(unit: str) -> Mapping[str, Any]: ...


@everyone
def reasons(unit: str) -> Sequence[str]: ...


@everyone
def context(unit: str) -> AbstractContextManager[Any] | None: ...


@everyone
def factory(unit: str) -> Callable[[], AbstractContextManager[Any]] | None: ...


@everyone_per_step
def told(unit: str, applied: bool) -> None: ...


@wrapper("model")
def refine(unit: str, model: str, phase: str) -> str: ...


@observer
def log(values: Mapping[str, float]) -> None: ...

"""A small contract with a hook of each kind and answer, so that tests need not follow the real one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from accel_core.contract.bound import compose, concatenate, enter, merge
from accel_core.contract.spec import spec


@spec("owner")
def decide(unit: str, options: Mapping[str, Any]) -> str | None: ...


@spec("owner", per_step=True)
def backward(unit: str, loss: float, boundary: bool) -> None: ...


@spec("everyone", merge)
def variables(unit: str) -> Mapping[str, Any]: ...


@spec("everyone", concatenate)
def reasons(unit: str) -> Sequence[str]: ...


@spec("everyone", enter)
def context(unit: str) -> AbstractContextManager[Any] | None: ...


@spec("everyone", compose)
def factory(unit: str) -> Callable[[], AbstractContextManager[Any]] | None: ...


@spec("everyone", per_step=True)
def told(unit: str, applied: bool) -> None: ...


@spec("wrapper")
def refine(unit: str, model: str, phase: str) -> str: ...


@spec("observer")
def log(values: Mapping[str, float]) -> None: ...

"""A small contract with a hook of each kind and answer, so that tests need not follow the real one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from accel_core.contract.spec import spec


class Collectives: ...


class Optimizer: ...


class OptimizerState: ...


@spec("owner")
def decide(unit: str, options: Mapping[str, Any]) -> str | None: ...


@spec("owner", per_step=True)
def backward(unit: str, loss: float, boundary: bool) -> None: ...


@spec("owner")
def is_done(unit: str) -> bool: ...


@spec("owner")
def words(unit: str) -> frozenset[str]: ...


@spec("owner")
def rows(unit: str) -> Sequence[str]: ...


@spec("owner")
def network(unit: str) -> Collectives: ...


@spec("owner")
def loader(unit: str) -> Iterable[str]: ...


@spec("owner")
def stepper(unit: str) -> Optimizer: ...


@spec("owner")
def moments(unit: str) -> OptimizerState: ...


@spec("everyone")
def variables(unit: str) -> Mapping[str, Any]: ...


@spec("everyone")
def reasons(unit: str) -> Sequence[str]: ...


@spec("everyone")
def context(unit: str) -> AbstractContextManager[Any] | None: ...


@spec("everyone")
def factory(unit: str) -> Callable[[], AbstractContextManager[Any]] | None: ...


@spec("everyone", per_step=True)
def told(unit: str, applied: bool) -> None: ...


@spec("wrapper")
def refine(unit: str, model: str, phase: str) -> str: ...


@spec("observer")
def log(values: Mapping[str, float]) -> None: ...

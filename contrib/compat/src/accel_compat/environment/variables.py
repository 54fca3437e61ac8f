"""Environment variables to read, patch and clear, and facts about the machine."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

_TRUE = ("y", "yes", "t", "true", "on", "1")
_FALSE = ("n", "no", "f", "false", "off", "0")


def convert_dict_to_env_variables(current_env: dict[str, Any]) -> list[str]:
    """Return a line KEY=VALUE for each variable that a shell can read.

    Others are left out, with a warning.
    """
    lines = []
    for key, value in current_env.items():
        if all(character not in f"{key}{value}" for character in "; \n<>") and key and value:
            lines.append(f"{key}={value}\n")
        else:
            logging.getLogger("accelerate.utils.environment").warning(
                "environment variable %s cannot be passed on", key
            )
    return lines


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """Turn a word for true or false into 1 or 0, or a bool with `to_bool`.

    The words are y, yes, t, true, on, 1 and n, no, f, false, off, 0.
    """
    word = value.lower()
    if word not in _TRUE + _FALSE:
        raise ValueError(f"invalid truth value {word}")
    return word in _TRUE if to_bool else int(word in _TRUE)


def parse_flag_from_env(key: str, default: bool | int = False) -> bool:
    """Return the truth of a variable.

    Raises:
        ValueError: it holds another word.
    """
    value = os.environ.get(key, str(default))
    if value.lower() not in _TRUE + _FALSE:
        raise ValueError(
            f"the variable {key} is {value!r}, not yes or no\nset it to true or false, or unset it"
        )
    return value.lower() in _TRUE


def parse_number_from_env(key: str, kind: type[float] = int) -> Any:
    """Return the number that a variable holds; None if it is not set.

    Raises:
        ValueError: it holds no such number.
    """
    value = os.environ.get(key)
    try:
        return None if value is None else kind(value)
    except ValueError as error:
        wanted = "a whole number" if kind is int else "a number"
        raise ValueError(
            f"the variable {key} is {value!r}, not {wanted}\nset it to one, or unset it"
        ) from error


def check_cuda_fp8_capability() -> bool:
    """Tell whether the GPU computes in fp8 (8.9 and later)."""
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


def load_affinity() -> Callable[[int, bool | None], None] | None:
    """Return accel-cuda's `override_numa_affinity`, or None without a GPU."""
    import torch

    from accel_compat.packages import load

    return load("accel_cuda:override_numa_affinity", "CPU affinity") if torch.cuda.is_available() else None


def override_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Bind this process to the CPUs near the GPU of this number.

    Without a GPU nothing changes.

    Raises:
        PluginError: there is a GPU, and accel-cuda is not installed.
    """
    override = load_affinity()
    if override is not None:
        override(local_process_index, verbose)


@functools.lru_cache
def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Call `override_numa_affinity` once."""
    override_numa_affinity(local_process_index, verbose)


@contextmanager
def clear_environment() -> Iterator[None]:
    """Remove all environment variables in a context; restore them afterwards."""
    before = os.environ.copy()
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def patch_environment(**kwargs: Any) -> Iterator[None]:
    """Set environment variables in a context; restore them afterwards.

    Keys are set in upper case, values as text.
    """
    names = [name.upper() for name in kwargs]
    before = {name: os.environ[name] for name in names if name in os.environ}
    os.environ.update(zip(names, map(str, kwargs.values()), strict=True))
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)
        os.environ.update(before)


@contextmanager
def _purged() -> Iterator[None]:
    def ours() -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if name.startswith("ACCELERATE_")}

    before = ours()
    try:
        yield
    finally:
        for name in ours():
            del os.environ[name]
        os.environ.update(before)


def purge_accelerate_environment(func_or_cls: T) -> T:
    """Restore ACCELERATE_* variables after the decorated function or test methods."""
    if not isinstance(func_or_cls, type):
        return _purged()(func_or_cls)  # type: ignore[type-var]
    _purge_tests(func_or_cls)

    def inherit(cls: Any, /, **kwargs: Any) -> None:
        _purge_tests(cls)

    func_or_cls.__init_subclass__ = classmethod(inherit)  # type: ignore[assignment]
    return func_or_cls


def _purge_tests(cls: type) -> None:
    for name in dir(cls):
        method = getattr(cls, name)
        if name.startswith("test") and callable(method) and not hasattr(method, "_purges_accelerate"):
            purging: Any = _purged()(method)
            purging._purges_accelerate = True
            setattr(cls, name, purging)

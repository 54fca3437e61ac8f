"""Decorators that skip a test where a device, a library or a version is absent."""

from __future__ import annotations

import os
import unittest
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any, Final

import torch

from accel_compat.environment import libraries
from accel_compat.environment.variables import parse_flag_from_env

Test = Any
"""A test function or a class of tests."""


def get_backend() -> tuple[str, int, Callable[[], int]]:
    """Return (type of devices here, their number, what tells the memory in use)."""
    found = torch.accelerator.current_accelerator(check_available=True)
    kind = "xla" if libraries.is_torch_xla_available() else "cpu" if found is None else found.type
    module: Any = getattr(torch, kind, None)
    allocated = getattr(module, "memory_allocated", getattr(module, "current_allocated_memory", lambda: 0))
    return kind, 1 if kind in ("cpu", "xla") else torch.accelerator.device_count(), allocated


torch_device, device_count, memory_allocated_func = get_backend()


def has(*names: str) -> bool:
    """Return whether all of these are available: `libraries.is_NAME_available()`."""
    return all(getattr(libraries, f"is_{name}_available")() for name in names)


def _several(kind: str) -> bool:
    return torch_device == kind and device_count > 1


CONDITIONS: Final[dict[str, tuple[Callable[[], bool], str]]] = {
    "cpu": (lambda: torch_device == "cpu", "a machine without accelerators"),
    "non_cpu": (lambda: torch_device != "cpu", "an accelerator"),
    "non_xpu": (lambda: torch_device != "xpu", "a device that is no XPU"),
    "non_hpu": (lambda: torch_device != "hpu", "a device that is no HPU"),
    "non_torch_xla": (lambda: not has("torch_xla"), "an environment without torch_xla"),
    "cuda": (lambda: torch_device == "cuda", "a GPU"),
    "cuda_or_hpu": (lambda: torch_device in ("cuda", "hpu"), "a GPU or HPU"),
    "cuda_or_xpu": (lambda: torch_device in ("cuda", "xpu"), "a GPU or XPU"),
    "single_device": (lambda: torch_device != "cpu" and device_count == 1, "one accelerator"),
    "single_gpu": (lambda: torch_device == "cuda" and device_count == 1, "one GPU"),
    "single_xpu": (lambda: torch_device == "xpu" and device_count == 1, "one XPU"),
    "multi_device": (lambda: device_count > 1, "several accelerators"),
    "multi_gpu": (lambda: _several("cuda"), "several GPUs"),
    "multi_xpu": (lambda: _several("xpu"), "several XPUs"),
    "multi_gpu_or_xpu": (lambda: _several("cuda") or _several("xpu"), "several GPUs or XPUs"),
    "tpu": (lambda: libraries.is_torch_xla_available(check_is_tpu=True), "a TPU"),
    "huggingface_suite": (lambda: has("transformers", "datasets"), "transformers and datasets"),
    "fsdp2": (lambda: libraries.is_torch_version(">=", "2.5.0"), "torch >= 2.5"),
    "tp": (
        lambda: has("transformers") and libraries.compare_versions("transformers", ">=", "4.52.0"),
        "transformers >= 4.52",
    ),
    "trackers": (
        lambda: not has("comet_ml") and any(map(has, ("wandb", "tensorboard", "trackio", "swanlab"))),
        "a tracker, and no comet_ml",
    ),
    "torchdata_stateful_dataloader": (
        libraries.is_torchdata_stateful_dataloader_available,
        "torchdata's stateful dataloader",
    ),
}
"""End of a decorator's name -> (what it asks for, in words)."""

AVAILABLE: Final = [
    name[len("is_") : -len("_available")]
    for name in vars(libraries)
    if name.startswith("is_") and name.endswith("_available")
]
"""End of a decorator's name that asks for `is_NAME_available()`."""


def _skip_unless(condition: Callable[[], bool], needs: str, test: Test) -> Test:
    return unittest.skipUnless(condition(), f"test requires {needs}")(test)


DECORATORS: Final = {
    **{f"require_{name}": partial(_skip_unless, partial(has, name), name) for name in AVAILABLE},
    **{f"require_{name}": partial(_skip_unless, *condition) for name, condition in CONDITIONS.items()},
}
globals().update(DECORATORS)


def require_torch_min_version(test_case: Test = None, version: str | None = None) -> Test:
    """Skip a test on an older torch."""
    if test_case is None:
        return partial(require_torch_min_version, version=version)
    return _skip_unless(
        lambda: libraries.is_torch_version(">=", str(version)), f"torch >= {version}", test_case
    )


def skip(test_case: Test) -> Test:
    """Skip a test always."""
    return unittest.skip("Test was skipped")(test_case)


def slow(test_case: Test) -> Test:
    """Skip a test unless the variable RUN_SLOW is true."""
    wanted = bool(parse_flag_from_env("RUN_SLOW", False))
    return unittest.skipUnless(wanted, "test is slow")(test_case)


def run_first(test_case: Test) -> Test:
    """Have pytest-order run a test first, where pytest is installed."""
    if find_spec("pytest") is None:
        return test_case
    import pytest

    return pytest.mark.order(1)(test_case)


def pytest_xdist_worker_id() -> int:
    """Return the number of this worker of pytest-xdist; 0 without it."""
    return int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))

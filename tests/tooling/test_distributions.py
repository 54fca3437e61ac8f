"""What is installed is what was meant to be: plugins, wheels, and no torch before it is needed."""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib import metadata
from pathlib import Path

import pytest

import accel_core
from accel_core.plugins.discovery import discover

PLUGINS = {
    "accel-core": {"native", "single", "fp32", "fp16", "bf16", "torchrun", "jsonl"},
    "accel-ddp": {"ddp"},
    "accel-fsdp": {"fsdp", "tensor-parallel"},
    "accel-cuda": {"cuda"},
    "accel-compat": {"compat"},
    "accel-interchange": {"checkpoint-accelerate", "checkpoint-dcp", "checkpoint-deepspeed"},
    "accel-inspect": {"checkpoint-diff", "checkpoint-show"},
    "accel-npu": {"npu"},
    "accel-musa": {"musa"},
    "accel-mlu": {"mlu"},
    "accel-sdaa": {"sdaa"},
    "accel-xpu": {"ipex", "xpu"},
    "accel-hpu": {"hpu"},
    "accel-mps": {"mps"},
    "accel-xla": {"xla", "xla-dp", "xla-spmd"},
    "accel-deepspeed": {"deepspeed"},
    "accel-megatron": {"megatron"},
    "accel-torchao": {"fp8-torchao"},
    "accel-transformer-engine": {"fp8-te"},
    "accel-tensorboard": {"tensorboard"},
    "accel-trackers": {
        "aim",
        "clearml",
        "comet",
        "dvclive",
        "mlflow",
        "neptune",
        "swanlab",
        "trackio",
        "wandb",
    },
    "accel-report": {"report", "watch"},
    "accel-slurm": {"slurm"},
    "accel-mpi": {"mpi"},
    "accel-ray": {"ray"},
    "accel-stores": {"fsspec"},
    "accel-kubernetes": {"kubernetes"},
    "accel-sagemaker": {"sagemaker"},
    "accel-context-parallel": {"cp"},
    "accel-ema": {"ema"},
    "accel-big-models": {"dispatched", "estimate"},
    "accel-bitsandbytes": {"bitsandbytes"},
    "accel-testing": {"plugins-check", "plugins-new"},
}
# tox says what its environment must hold; elsewhere it is what happens to be installed.
EXPECTED = os.environ.get("ACCEL_TEST_DISTRIBUTIONS")
NAMES = (
    [name for name in PLUGINS if name in EXPECTED.split() or "all" in EXPECTED.split()]
    if EXPECTED
    else [name for name in PLUGINS if importlib.util.find_spec(name.replace("-", "_"))]
)
MODULES = [name.replace("-", "_") for name in NAMES]

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is left out here")


def run(run_command, code: str) -> str:
    result = run_command(
        [sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_discovered_plugins_are_exactly_those_of_the_installed_distributions() -> None:
    ours = [record for record in discover().records if record.distribution in PLUGINS]

    assert {record.name for record in ours} == set().union(*(PLUGINS[name] for name in NAMES))
    assert {record.status for record in ours} <= {"available", "unavailable"}


@pytest.mark.skipif(EXPECTED is None, reason="tox sets ACCEL_TEST_DISTRIBUTIONS; this is no such environment")
@pytest.mark.parametrize("module", MODULES)
def test_tests_run_on_wheels_and_not_on_the_checkout(module: str) -> None:
    spec = importlib.util.find_spec(module)

    assert spec is not None
    assert spec.origin is not None
    assert "site-packages" in Path(spec.origin).parts


def where_accel_core_is() -> str | None:
    return importlib.import_module("accel_core").__file__


@needs_torch
def test_workers_run_on_what_this_process_runs_on(run_processes) -> None:
    assert run_processes(where_accel_core_is, world=1) == [accel_core.__file__]


@pytest.mark.parametrize("module", MODULES)
def test_a_distribution_is_typed_and_its_version_is_its_modules(module: str) -> None:
    imported = importlib.import_module(module)

    assert metadata.version(module.replace("_", "-")) == imported.__version__
    assert (Path(imported.__file__ or "").parent / "py.typed").exists()


def test_listing_all_plugins_imports_no_torch(run_command) -> None:
    code = """
import sys
from accel_core.plugins.discovery import discover
from accel_testing import run_processes
print([record.status for record in discover().records], "torch" in sys.modules)
"""

    assert run(run_command, code).endswith("False\n")


@pytest.mark.parametrize("module", MODULES)
def test_importing_a_distribution_imports_nothing_of_its_own_but_what_it_needs(
    module: str, run_command
) -> None:
    code = (
        f"import {module}, sys; print(sorted(m for m in sys.modules if m.startswith(('torch', '{module}.'))))"
    )

    assert run(run_command, code).strip() == "[]"


@needs_torch
@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_of_a_distribution_can_be_loaded(module: str) -> None:
    imported = importlib.import_module(module)

    assert [name for name in imported.__all__ if getattr(imported, name, None) is None] == []

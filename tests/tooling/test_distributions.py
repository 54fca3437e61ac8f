"""What is installed is what was meant to be: plugins, wheels, and no torch before it is needed."""

from __future__ import annotations

import importlib.util
import os
import re
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
    "accel-checkpoint-tools": {"checkpoint"},
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
    "accel-trackers": {
        "aim",
        "clearml",
        "comet",
        "dvclive",
        "mlflow",
        "neptune",
        "swanlab",
        "tensorboard",
        "trackio",
        "wandb",
    },
    "accel-monitor": {"monitor", "replicas", "report", "watch"},
    "accel-slurm": {"slurm"},
    "accel-mpi": {"mpi"},
    "accel-ray": {"ray"},
    "accel-stores": {"fsspec", "mirror"},
    "accel-kubernetes": {"kubernetes"},
    "accel-sagemaker": {"sagemaker"},
    "accel-context-parallel": {"cp"},
    "accel-data": {"data-libraries"},
    "accel-ema": {"ema"},
    "accel-big-models": {"dispatched", "estimate"},
    "accel-bitsandbytes": {"bitsandbytes"},
    "accel-testing": {"plugins-check", "plugins-new"},
}
# tox says what its environment must hold; elsewhere it is what happens to be installed.
EXPECTED = os.environ.get("ACCEL_TEST_DISTRIBUTIONS")


def with_required(names: set[str]) -> set[str]:
    """Return these distributions of ours, and those that they declare."""
    lines = [line for name in names for line in metadata.requires(name) or () if "extra ==" not in line]
    asked = {re.split(r"[^a-z0-9-]", line, maxsplit=1)[0] for line in lines} & PLUGINS.keys()
    return names if asked <= names else with_required(names | asked)


def expected() -> set[str]:
    if EXPECTED is None:
        return {name for name in PLUGINS if importlib.util.find_spec(name.replace("-", "_"))}
    words = {word.partition("[")[0] for word in EXPECTED.split()}
    return {*PLUGINS} if "all" in words else with_required(words & PLUGINS.keys())


NAMES = sorted(expected())
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
    assert {record.status for record in ours if record.name != "monitor"} <= {"available", "unavailable"}


@pytest.mark.skipif(EXPECTED is None, reason="tox sets ACCEL_TEST_DISTRIBUTIONS; this is no such environment")
def test_tests_run_on_wheels_and_not_on_the_checkout() -> None:
    specs = {module: importlib.util.find_spec(module) for module in MODULES}
    origins = {module: spec and spec.origin for module, spec in specs.items()}

    assert [it for it in origins.items() if "site-packages" not in Path(it[1] or "").parts] == []


def where_accel_core_is() -> str | None:
    return importlib.import_module("accel_core").__file__


@needs_torch
def test_workers_run_on_what_this_process_runs_on(run_processes) -> None:
    assert run_processes(where_accel_core_is, world=1) == [accel_core.__file__]


def test_each_distribution_is_typed_and_has_the_version_of_its_module() -> None:
    imported = [importlib.import_module(module) for module in MODULES]
    folders = [Path(module.__file__ or "").parent for module in imported]

    assert [folder for folder in folders if not (folder / "py.typed").exists()] == []
    versions = {name: metadata.version(name) for name in NAMES}
    assert versions == {name: module.__version__ for name, module in zip(NAMES, imported, strict=True)}


def test_listing_all_plugins_imports_no_torch(run_command) -> None:
    code = """
import sys
from accel_core.plugins.discovery import discover
from accel_testing import run_processes
print([record.status for record in discover().records], "torch" in sys.modules)
"""

    assert run(run_command, code).endswith("False\n")


def test_importing_a_distribution_imports_neither_torch_nor_modules_of_its_own(run_command) -> None:
    """Listing plugins, and each command, imports all of them."""
    code = f"""
import sys
from importlib import import_module
for name in {MODULES}:
    before = set(sys.modules)
    import_module(name)
    print(name, sorted(new for new in set(sys.modules) - before if new.startswith(("torch", name + "."))))
"""

    assert run(run_command, code).splitlines() == [f"{name} []" for name in MODULES]


@needs_torch
def test_every_public_name_of_a_distribution_can_be_loaded() -> None:
    imported = map(importlib.import_module, MODULES)
    names = [(module, name) for module in imported for name in module.__all__]

    assert [(module.__name__, name) for module, name in names if getattr(module, name, None) is None] == []

"""What runs before workers start needs no torch: there may be none, or one that its vendor has broken."""

from __future__ import annotations

import pkgutil
import sys
from pathlib import Path

import pytest

import accel_core

LIGHT = [
    "accel_core",
    "accel_core.plugins.discovery",
    "accel_core.plugins.manager",
    "accel_core.contract.hooks",
    "accel_core.errors",
]
LIGHT_PACKAGES = ["accel_core.config", "accel_core.cli"]


def light_modules() -> list[str]:
    found = list(LIGHT)
    for package in LIGHT_PACKAGES:
        folder = Path(accel_core.__file__).parent / package.rpartition(".")[2]
        found += [package, *(f"{package}.{module.name}" for module in pkgutil.iter_modules([str(folder)]))]
    return found


def without_torch(run_command, code: str) -> str:
    ended = run_command(
        [sys.executable, "-I", "-c", f"import sys; sys.modules['torch'] = None\n{code}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.parametrize("module", light_modules())
def test_a_module_used_before_workers_start_imports_without_torch(module, run_command):
    without_torch(run_command, f"import {module}")


def test_the_command_explains_itself_without_torch(run_command):
    listed = without_torch(
        run_command, "from accel_core.cli import main; sys.argv = ['accel', '--help']; main()"
    )

    assert "launch" in listed
    assert "plugins" in listed

"""What runs before workers start imports no torch: it would cost every command more than a second."""

from __future__ import annotations

import sys

import pytest

EACH_OF = """
import importlib, pkgutil, sys
package = importlib.import_module("{0}")
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""


def torch_after(run_command, script: str) -> bool:
    """Whether a fresh process has imported torch after `script`."""
    done = run_command(
        [sys.executable, "-c", f"{script}\nimport sys; print('torch' in sys.modules)"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1] == "True"


def test_this_test_can_see_torch(run_command):
    pytest.importorskip("torch")
    assert torch_after(run_command, "import torch")


@pytest.mark.parametrize(
    "module",
    [
        "accel_core",
        "accel_core.plugins.discovery",
        "accel_core.plugins.manager",
        "accel_core.contract.hooks",
        "accel_core.defaults",
    ],
)
def test_the_host_imports_no_torch(module, run_command):
    assert not torch_after(run_command, f"import {module}")


@pytest.mark.parametrize("package", ["accel_core.config", "accel_core.cli"])
def test_no_module_of_what_the_command_line_uses_imports_torch(package, run_command):
    assert not torch_after(run_command, EACH_OF.format(package))


def test_discovery_and_every_probe_import_no_torch(run_command):
    assert not torch_after(
        run_command,
        "from accel_core.plugins.discovery import discover\n"
        "assert [record.status for record in discover().records if record.distribution == 'accel-core']",
    )


def test_what_plugins_are_written_with_imports_no_torch(run_command):
    assert not torch_after(
        run_command, "from accel_core import Card, PluginError, Unit, World, hooks, implements, no_op, option"
    )

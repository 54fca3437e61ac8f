"""`@implements` lets a type checker compare an implementation with its spec."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

pytest.importorskip("mypy")
pytestmark = pytest.mark.needs("accel-ddp")

HEAD = """\
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from accel_core import Unit, hooks, implements


class Plugin:
"""
METHODS = {
    "right": """
    @implements(hooks.backward)
    def backward(self, unit: Unit, loss: Tensor, boundary: bool, options: Mapping[str, Any]) -> None: ...
""",
    "wrong_hook": """
    @implements(hooks.bakward)
    def backward(self, unit: Unit, loss: Tensor, boundary: bool, options: Mapping[str, Any]) -> None: ...
""",
    "wrong_name": """
    @implements(hooks.backward)
    def backward(self, unit: Unit, los: Tensor, boundary: bool, options: Mapping[str, Any]) -> None: ...
""",
    "wrong_type": """
    @implements(hooks.backward)
    def backward(self, unit: Unit, loss: Tensor, boundary: str, options: Mapping[str, Any]) -> None: ...
""",
    "wrong_result": """
    @implements(hooks.optimizer_step)
    def optimizer_step(self, unit: Unit, optimizer: Any, closure: Any) -> str: ...
""",
    "missing_argument": """
    @implements(hooks.backward)
    def backward(self, unit: Unit, loss: Tensor) -> None: ...
""",
}
CONFIG = "[mypy]\nstrict = true\ndisable_error_code = empty-body\n[mypy-torch.*]\nfollow_imports = skip\n"


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory, run_command) -> Mapping[str, list[str]]:
    """What mypy says of each file."""
    folder: Path = tmp_path_factory.mktemp("typed")
    for name, method in METHODS.items():
        (folder / f"{name}.py").write_text(HEAD + method)
    (folder / "mypy.ini").write_text(CONFIG)
    done = run_command(
        [sys.executable, "-m", "mypy", "--follow-imports=silent", *(f"{name}.py" for name in METHODS)],
        cwd=folder,
        env={**os.environ, "MYPY_CACHE_DIR": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found: dict[str, list[str]] = {name: [] for name in METHODS}
    for line in done.stdout.splitlines():
        match = re.match(r"(\w+)\.py:\d+: error: (.*)", line)
        if match:
            found[match[1]].append(match[2])
    return found


def test_the_specs_own_signature_passes(errors):
    assert errors["right"] == []


def test_a_misspelt_hook_is_an_error(errors):
    assert 'has no attribute "bakward"' in errors["wrong_hook"][0]


@pytest.mark.parametrize("mistake", ["wrong_name", "wrong_type", "wrong_result", "missing_argument"])
def test_a_signature_that_differs_is_an_error(errors, mistake):
    assert len(errors[mistake]) == 1
    assert "incompatible type" in errors[mistake][0]

"""A vendor's signatures are recorded from its repository at one commit, and a change of them is seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import checkout
import pytest

tool = checkout.tool("vendor_signatures")


def git(run_command, folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.example")
    command = ["git", "-C", str(folder), *identity, *arguments]
    return run_command(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def clone(tmp_path: Path, run_command) -> Path:
    """A vendor's repository with one commit."""
    folder = tmp_path / "vendor"
    folder.mkdir()
    git(run_command, folder, "init", "--quiet")
    (folder / "device.py").write_text("def set_device(device: int, *, late: bool = False) -> None: ...\n")
    git(run_command, folder, "add", ".")
    git(run_command, folder, "commit", "--quiet", "-m", "first")
    return folder


def record(run_command, clone: Path, **changed: Any) -> Path:
    file = clone.parent / "vendor.json"
    functions = {"device.py": {"set_device": ""}}
    about = {
        "commit": git(run_command, clone, "rev-parse", "HEAD"),
        "functions": functions,
        "texts": {},
        **changed,
    }
    file.write_text(json.dumps(about))
    return file


def test_parameters_are_recorded_without_annotations(clone: Path, run_command) -> None:
    file = record(run_command, clone, texts={"device.py": ["late: bool"]})

    assert tool.main([str(file), str(clone)]) == 0

    assert json.loads(file.read_text())["functions"] == {"device.py": {"set_device": "device, *, late=False"}}
    assert tool.main(["--check", str(file), str(clone)]) == 0


def test_a_signature_that_is_not_as_recorded_is_stale(clone: Path, run_command) -> None:
    assert tool.main(["--check", str(record(run_command, clone)), str(clone)]) == 1


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"functions": {"device.py": {"is_gone": ""}}}, "device.py defines no is_gone"),
        ({"texts": {"device.py": ["never written"]}}, "device.py does not contain never written"),
        ({"functions": {"moved.py": {"set_device": ""}}}, "moved.py"),
    ],
)
def test_what_the_vendor_has_not_is_told(
    clone: Path, changed: dict[str, Any], said: str, run_command
) -> None:
    with pytest.raises(SystemExit, match=said):
        tool.main([str(record(run_command, clone, **changed)), str(clone)])

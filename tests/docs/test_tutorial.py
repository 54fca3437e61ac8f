"""docs/write-a-backend.md, followed word by word in an empty folder, on what is installed."""

from __future__ import annotations

import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from shell import Shell, play
from snippets import ROOT

import accel_core

PAGE = ROOT / "docs" / "write-a-backend.md"
CORE = Path(accel_core.__file__).parent


class Stranger(Shell):
    """What the page has them install is built, and put in a folder of theirs."""

    def install(self, command: str) -> str:
        site, wheels = self.folder / "site", self.folder / "wheels"
        for project in command.split()[2:]:
            self.uv("build", "--wheel", "--out-dir", str(wheels), project)
        self.uv("pip", "install", "--no-deps", "--target", str(site), *map(str, wheels.glob("*.whl")))
        self.environment["PYTHONPATH"] = str(site)
        return ""

    def uv(self, *arguments: str) -> None:
        self(shlex.join([sys.executable, "-m", "uv", "--quiet", *arguments]), 600)


def lines_of_core() -> dict[Path, list[bytes]]:
    return {
        path: path.read_bytes().splitlines()
        for path in CORE.glob("**/*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    not all(map(find_spec, ("uv", "accel_ddp"))), reason="the page builds a wheel, and names a strategy"
)
def test_it_ends_with_a_passing_kit_and_no_line_of_core_changed(tmp_path: Path, start_command, run_processes):
    before = lines_of_core()

    printed = play(PAGE, Stranger(tmp_path, start_command, run_processes), slow=True)

    results = [line for text in printed for line in text.splitlines() if line.startswith("acme + ddp (sim")]
    assert [line.partition("passed, ")[2] for line in results] == ["0 failed, 0 xfailed, 1 skipped"]
    changed = [path for path, lines in lines_of_core().items() if before.get(path) != lines]
    assert len(changed) == 0

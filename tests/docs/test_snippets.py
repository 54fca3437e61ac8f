"""What the documentation shows does what the page says; see snippets.py. tests/repository reads the rest."""

from __future__ import annotations

import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from shell import Shell, play
from snippets import ROOT, blocks, documents

OURS = "accel-core accel-ddp accel-cuda accel-trackers tensorboard"

needs_everything = pytest.mark.skipif(
    not all(find_spec(name.replace("-", "_")) for name in OURS.split()),
    reason="the documentation speaks of all packages of this repository",
)


def by_path(path: Path) -> str:
    return str(path.relative_to(ROOT))


@needs_everything
@pytest.mark.parametrize("document", documents(), ids=by_path)
def test_snippets_do_what_the_page_says(document: Path, tmp_path: Path, start_command, run_processes):
    # Without the packages' sources, which would stand before what is installed.
    for name in ("examples", "contrib", "benchmarks", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name)

    play(document, Shell(tmp_path, start_command, run_processes))


@pytest.mark.full
@pytest.mark.timeout(1800)
@needs_everything
@pytest.mark.parametrize("document", documents(), ids=by_path)
def test_what_installs_or_takes_long_works_in_a_fresh_checkout(
    document: Path, tmp_path: Path, start_command, run_processes
):
    if not any(block.words[1:] in {("slow",), ("tox",)} for block in blocks(document)):
        pytest.skip("nothing here is slow")
    checkout = tmp_path / "checkout"
    ignored = shutil.ignore_patterns(".git", ".tox", ".venv*", ".*cache", "shared", "__pycache__", "digits-*")
    shutil.copytree(ROOT, checkout, ignore=ignored)

    printed = play(document, Shell(checkout, start_command, run_processes), slow=True)

    if document.name == "README.md" and document.parent == ROOT:
        assert float(re.findall(r"test accuracy (\S+)%", printed[1])[-1]) >= 97

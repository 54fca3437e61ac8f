"""What the documentation shows is run, found in the sources, or regenerated; see snippets.py."""

from __future__ import annotations

import re
import shutil
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest
from shell import Shell, play
from snippets import ROOT, Block, blocks, documents, quoted_file

KNOWN = {"", "sh", "sh dry-run", "sh install", "sh slow", "sh tox", "text", "python", "diff", "powershell"}
OURS = "accel-core accel-ddp accel-cuda accel-tensorboard"

needs_everything = pytest.mark.skipif(
    not all(find_spec(name.replace("-", "_")) for name in OURS.split()),
    reason="the documentation speaks of all packages of this repository",
)


def by_path(path: Path) -> str:
    return str(path.relative_to(ROOT))


@needs_everything
@pytest.mark.parametrize("document", documents(), ids=by_path)
def test_snippets_do_what_the_page_says(document: Path, tmp_path: Path):
    # Without the packages' sources, which would stand before what is installed.
    for name in ("examples", "contrib", "benchmarks", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name)

    play(document, Shell(tmp_path))


@pytest.mark.parametrize("document", documents(), ids=by_path)
def test_every_block_says_what_is_to_be_done_with_it(document: Path):
    for block in blocks(document):
        named = len(block.words) == 2 and block.words[0] in ("yaml", "python", "toml")
        assert named or " ".join(block.words) in KNOWN, f"{block}: ```{' '.join(block.words)}"


def quoted() -> list[Block]:
    found = [block for document in documents() for block in blocks(document)]
    return [block for block in found if len(block.words) == 2 and block.words[0] in ("python", "toml")]


@pytest.mark.parametrize("block", quoted(), ids=str)
def test_what_a_page_quotes_stands_in_the_file_it_names(block: Block):
    source = quoted_file(block.words[1])

    for part in block.text.split("...\n"):
        assert part.strip("\n") in source


def test_windows_is_told_the_same():
    every = [block for document in documents() for block in blocks(document)]
    pairs = [(a, b) for a, b in pairwise(every) if b.words == ("powershell",)]

    assert pairs
    for unix, windows in pairs:
        assert windows.text == unix.text.replace(" &&", ";").replace(".venv/bin/", ".venv\\Scripts\\")


@pytest.mark.parametrize("document", documents(), ids=by_path)
def test_links_lead_somewhere(document: Path):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text(encoding="utf-8")):
        assert (document.parent / target).exists(), target


@pytest.mark.full
@pytest.mark.timeout(1800)
@needs_everything
@pytest.mark.parametrize("document", documents(), ids=by_path)
def test_what_installs_or_takes_long_works_in_a_fresh_checkout(document: Path, tmp_path: Path):
    if not any(block.words[1:] in {("slow",), ("tox",)} for block in blocks(document)):
        pytest.skip("nothing here is slow")
    checkout = tmp_path / "checkout"
    ignored = shutil.ignore_patterns(".git", ".tox", ".venv*", ".*cache", "shared", "__pycache__", "digits-*")
    shutil.copytree(ROOT, checkout, ignore=ignored)

    printed = play(document, Shell(checkout), slow=True)

    if document.name == "README.md" and document.parent == ROOT:
        assert float(re.findall(r"test accuracy (\S+)%", printed[1])[-1]) >= 97

"""What the documentation shows is run, found in the sources, or regenerated; see snippets.py."""

from __future__ import annotations

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from snippets import ROOT, Block, blocks, documents, quoted_file

KNOWN = {"", "sh", "sh dry-run", "sh install", "sh slow", "sh tox", "text", "python", "diff", "powershell"}
TRAIN = """\
from accel_core import Accelerator

accelerator = Accelerator()
accelerator.print(accelerator.num_processes, "trained")
accelerator.end_training()
"""
OURS = "accel-core accel-ddp accel-cuda accel-tensorboard"
DISTRIBUTIONS = os.environ.get("ACCEL_TEST_DISTRIBUTIONS", OURS).split()

needs_everything = pytest.mark.skipif(
    not set(OURS.split()) <= set(DISTRIBUTIONS),
    reason="the documentation speaks of all packages of this repository",
)


def by_path(path: Path) -> str:
    return str(path.relative_to(ROOT))


class Shell:
    """Runs commands by bash in a folder, with the programs of this environment first on the path."""

    def __init__(self, folder: Path) -> None:
        (folder / "train.py").write_text(TRAIN)
        self.folder = folder
        clean = {name: value for name, value in os.environ.items() if not name.startswith("ACCEL")}
        programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        more = {"OMP_NUM_THREADS": "1", "PATH": programs}
        more["CUDA_VISIBLE_DEVICES"] = ""  # pages ask for more processes than a machine may have GPUs
        more["PIP_CONSTRAINT"] = str(ROOT / "constraints.txt")
        self.environment = clean | more

    def __call__(self, command: str, seconds: float = 100) -> str:
        with subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=self.folder,
            env=self.environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                raise
        assert process.returncode == 0, f"{command}\n{output}"
        return output

    def install(self, command: str) -> str:
        """Put the projects that a `pip install ./FOLDER ...` names on the path, as pip would."""
        site = self.folder / "site"
        for name in re.findall(r"\./(\S+)", command):
            _install(self.folder / name, site)
        self.environment["PYTHONPATH"] = str(site)
        return ""


def _install(project: Path, site: Path) -> None:
    text = (project / "pyproject.toml").read_text(encoding="utf-8")
    name, version = (re.search(rf'^{key} = "(.+)"$', text, re.MULTILINE)[1] for key in ("name", "version"))
    needed = re.search(r"^dependencies = (\[.*?\])", text, re.MULTILINE | re.DOTALL)[1]
    groups = re.findall(r'^\[project\.entry-points\."(.+)"\]\n((?:.+ = .+\n)+)', text, re.MULTILINE)
    shutil.copytree(project / "src", site, dirs_exist_ok=True)
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    about = ["Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}"]
    about += [f"Requires-Dist: {requirement}" for requirement in ast.literal_eval(needed)]
    (info / "METADATA").write_text("\n".join(about) + "\n")
    rows = "\n".join(f"[{group}]\n{entries}" for group, entries in groups)
    (info / "entry_points.txt").write_text(rows.replace('"', ""))


def play(document: Path, shell: Shell, *, slow: bool = False) -> list[str]:
    """Do with each block what its words say; what each command printed."""
    printed = [""]
    skipped = False
    for block in blocks(document):
        match block.words:
            case ("sh",):
                printed.append(shell(block.text))
            case ("sh", "dry-run"):
                printed.append(shell(block.text.replace("accel launch", "accel launch --dry-run")))
            case ("sh", "install"):
                shell.install(block.text)
            case ("sh", "slow") if slow:
                printed.append(shell(block.text, 1500))
            case ("sh", "tox") if slow:
                printed.append(shell(block.text.replace("bin/tox", "bin/tox list"), 600))
            case ("text",) if not skipped:
                assert not missing_lines(block.text, printed[-1]), f"{block}\n{printed[-1]}"
            case ("yaml", name):
                (shell.folder / name).write_text(block.text)
                shell(f"accel config check --config {name}")
            case ("python",):
                (shell.folder / "snippet.py").write_text(block.text)
                printed.append(shell("python snippet.py"))
        skipped = "slow" in block.words and not slow
    return printed


def missing_lines(shown: str, printed: str) -> list[str]:
    """The first line that was not printed behind those before it."""
    rest = printed.splitlines()
    for line in shown.splitlines():
        pattern = ".*".join(map(re.escape, line.split("..."))).replace(r"\ ", r"\s+")
        while rest and not re.fullmatch(pattern, rest[0].rstrip()):
            rest.pop(0)
        if not rest:
            return [line]
    return []


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


@pytest.mark.slow
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

"""A shell that does what a page says, block by block."""

from __future__ import annotations

import ast
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

from snippets import ROOT, blocks

from accel_testing.patience import patience

LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
LAUNCHED += ("MASTER_ADDR", "MASTER_PORT")
"""Variables that a program which nobody launched does not have."""

TRAIN = '''\
"""A script to launch."""

from __future__ import annotations

from accel_core import Accelerator

accelerator = Accelerator()
accelerator.print(accelerator.num_processes, "trained")
accelerator.end_training()
'''


class Shell:
    """Runs commands by bash in a folder, with the programs of this environment first on the path."""

    def __init__(
        self, folder: Path, start_command: Callable[..., Any], run_processes: Callable[..., Any]
    ) -> None:
        self.start_command, self.run_processes = start_command, run_processes
        (folder / "train.py").write_text(TRAIN)
        self.folder = folder
        # A tox in it would else work in the folder of the tox that runs these tests, and wait for it.
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("ACCEL", "TOX_"))}
        programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        more = {"OMP_NUM_THREADS": "1", "PATH": programs}
        more["CUDA_VISIBLE_DEVICES"] = ""  # pages ask for more processes than a machine may have GPUs
        more["PIP_CONSTRAINT"] = str(ROOT / "constraints.txt")
        self.environment = clean | more

    def __call__(self, command: str, seconds: float = 100) -> str:
        with self.start_command(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=self.folder,
            env=self.environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=patience(seconds))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                raise
        assert process.returncode == 0, f"{command}\n{output}"
        return output

    def python(self, code: str) -> str:
        """Run a program in a process that has imported torch already: two seconds for each of many."""
        (self.folder / "snippet.py").write_text(code)  # for commands that follow
        gone = {name: None for name in os.environ if name not in self.environment}
        variables = gone | dict.fromkeys(LAUNCHED) | self.environment
        return self.run_processes(_printed, str(self.folder), code, world=1, environment=variables)[0]

    def install(self, command: str) -> str:
        """Put the projects that a `pip install ./FOLDER ...` names on the path, as pip would."""
        site = self.folder / "site"
        for name in re.findall(r"\./(\S+)", command):
            _install(self.folder / name, site)
        self.environment["PYTHONPATH"] = str(site)
        return ""


def _printed(folder: str, code: str) -> str:
    os.chdir(folder)
    sys.path[:0] = [folder, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    warnings.simplefilter("default")  # not as errors, which they are in tests
    main = sys.modules["__main__"] = ModuleType("__main__")
    output = io.StringIO()
    with redirect_stdout(output), redirect_stderr(output):
        exec(compile(code, "snippet.py", "exec"), vars(main))
    return output.getvalue()


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
                printed.append(shell(re.sub("bin/tox.*", "bin/tox list", block.text), 600))
            case ("text",) if not skipped:
                assert not missing_lines(block.text, printed[-1]), f"{block}\n{printed[-1]}"
            case ("yaml", name):
                (shell.folder / name).write_text(block.text)
                shell(f"accel config check --config {name}")
            case ("python",):
                printed.append(shell.python(block.text))
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

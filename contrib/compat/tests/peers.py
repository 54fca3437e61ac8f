"""Running a piece of code under Accelerate itself, and under accel-compat, to compare what they print."""

from __future__ import annotations

import io
import json
import sys
import textwrap
import warnings
from collections.abc import Mapping
from contextlib import redirect_stdout
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest

OURS = "import accel_compat; accel_compat.install()\n"
# This process has installed ours, and so has whatever it forks.
THEIRS = """\
import sys
sys.meta_path[:] = [each for each in sys.meta_path if type(each).__module__ != "accel_compat.activation"]
"""
WORLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
ALONE = dict.fromkeys((*WORLD, "MASTER_ADDR", "MASTER_PORT"))
"""A process that nobody launched has none of the variables."""
needs_accelerate = pytest.mark.skipif(
    find_spec("huggingface_hub") is None, reason="Accelerate itself is not installed"
)


def printed(code: str) -> str:
    """Run a program in this process, as `__main__`."""
    warnings.simplefilter("ignore")
    main = sys.modules["__main__"] = ModuleType("__main__")
    with redirect_stdout(io.StringIO()) as output:
        exec(compile(code, "peer.py", "exec"), vars(main))
    return output.getvalue()


def run_program(
    run_processes, code: str, *, ours: bool, environment: Mapping[str, str] | None = None, processes: int = 1
) -> str:
    """What the code printed on rank 0, in processes that know nothing of this one's `accelerate`."""
    text = (OURS if ours else THEIRS) + textwrap.dedent(code)
    variables = {"ACCEL_COMPAT": "1" if ours else None} | (ALONE if processes == 1 else {})
    variables |= dict(environment or {})
    return run_processes(printed, text, world=processes, environment=variables, timeout=110)[0]


def said(
    run_processes, code: str, *, ours: bool, environment: Mapping[str, str] | None = None, processes: int = 1
) -> Any:
    """What the code printed as JSON on its last line, on rank 0."""
    lines = run_program(run_processes, code, ours=ours, environment=environment, processes=processes)
    return json.loads(lines.strip().splitlines()[-1])

"""Running a piece of code under Accelerate itself, and under accel-compat, to compare what they print."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

OURS = "import accel_compat; accel_compat.install()\n"
# Accelerate leaves its process group alone at the end, which aborts a process now and then.
AT_ONCE = "\nimport os, sys; sys.stdout.flush(); os._exit(0)\n"
ONLY_RANK_0 = "import os, sys\nif os.environ['RANK'] != '0': sys.stdout = open(os.devnull, 'w')\n"
needs_accelerate = pytest.mark.skipif(
    find_spec("huggingface_hub") is None, reason="Accelerate itself is not installed"
)


def said(code: str, *, ours: bool, environment: Mapping[str, str] | None = None, processes: int = 1) -> Any:
    """What the code printed as JSON on its last line, on rank 0."""
    text = (OURS if ours else "") + textwrap.dedent(code) + ("" if ours else AT_ONCE)
    script = ["-c", text]
    if processes > 1:
        file = Path(os.environ["PYTEST_TMP"], "peer.py")
        file.write_text(ONLY_RANK_0 + text)
        script = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(processes),
            str(file),
        ]
    done = subprocess.run(
        [sys.executable, *script],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **(environment or {})},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])

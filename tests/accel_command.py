"""The `accel` command as a user runs it: a process with an environment of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ACCEL = str(Path(sys.executable).with_name("accel"))
NOT_INHERITED = (
    *("ACCEL", "RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC"),
    *("SLURM", "PMI", "OMPI", "MV2", "JSM", "FLUX", "PALS"),
)


def clean_environment(given: Mapping[str, str] | None = None) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(NOT_INHERITED)}
    return {**kept, "OMP_NUM_THREADS": "1", **(given or {})}


def accel(
    *words: str, environment: Mapping[str, str] | None = None, cwd: Path | None = None, timeout: float = 60
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ACCEL, *words],
        env=clean_environment(environment),
        cwd=cwd,
        timeout=timeout,
        capture_output=True,
        text=True,
        check=False,
    )

"""Run the conformance kit from a test, in an empty folder."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

__all__ = ["conform"]


def conform(folder: Path, stack: str, *options: str, path: Sequence[Path] = ()) -> str:
    """Run the kit on `stack` in `folder`, and return its output.

    `folder` and `path` come first on the import path.

    Leaves the report in the folder that ACCEL_KIT_REPORTS names, if it is set.

    Raises:
        AssertionError: a check failed; the message ends with what the kit printed.
    """
    command = [sys.executable, "-m", "pytest", "--pyargs", "accel_testing", "-p", "no:cacheprovider"]
    if reports := os.environ.get("ACCEL_KIT_REPORTS"):
        Path(reports).mkdir(parents=True, exist_ok=True)
        command += ["--accel-report", str(Path(reports, f"{stack}-{uuid.uuid4().hex}.json"))]
    inherited = os.environ.get("PYTHONPATH")
    places = [str(folder), *map(str, path), *([inherited] if inherited else [])]
    result = subprocess.run(
        [*command, "--accel-stack", stack, *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode != 0:
        raise AssertionError(result.stdout[-6000:] + result.stderr[-2000:])
    return result.stdout

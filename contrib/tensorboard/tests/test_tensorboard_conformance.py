"""The package, installed, against the conformance kit, as its author would run it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_the_kit_is_green_from_an_empty_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "--pyargs", "accel_core.testing", "-p", "no:cacheprovider"]
    command += ["--accel-stack", "tensorboard", "--accel-level", "0,1"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert "0 failed, 0 xfailed, 0 skipped" in result.stdout

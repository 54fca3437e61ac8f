"""The README's example: the same numbers as plain PyTorch."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

EXAMPLES = Path(__file__).parents[2] / "examples"


def printed(run_command, script: str, folder: Path) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "ACCEL__DEVICE": "cpu"}
    result = run_command(
        [sys.executable, EXAMPLES / script],
        cwd=folder,
        env=environment,
        text=True,
        capture_output=True,
        check=True,
    )
    return result.stdout


def test_one_process_prints_what_plain_pytorch_prints(tmp_path: Path, run_command):
    lines = printed(run_command, "minimal.py", tmp_path)

    assert lines.count("epoch") == 4
    assert lines == printed(run_command, "minimal_plain.py", tmp_path)

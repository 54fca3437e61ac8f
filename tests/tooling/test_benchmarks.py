"""The benchmark of discovery and binding runs: it uses core's insides, which change."""

from __future__ import annotations

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_discovery_and_binding_are_measured(run_command) -> None:
    ended = run_command(
        [sys.executable, "run.py", "host", "--rounds", "1"],
        cwd=BENCHMARKS,
        capture_output=True,
        text=True,
        check=False,
    )

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("\n| discovery of") == 1
    assert "hooks of a run of 4 plugins" in ended.stdout

"""The conformance kit on the simulated device, which bears the very name `npu`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from accel_core.testing.simulated import write_distribution


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("stack", "worlds"),
    [("npu", "1"), ("npu+bf16", "1"), pytest.param("npu+ddp", "1,2", marks=pytest.mark.together)],
)
def test_it_conforms_on_the_simulated_device(tmp_path: Path, stack: str, worlds: str) -> None:
    write_distribution(tmp_path, "torch_npu", "\n", version="2.13.0", requires=())
    path = os.pathsep.join(map(str, (tmp_path, Path(__file__).parent / "stub")))
    command = [sys.executable, "-m", "pytest", "--pyargs", "accel_core.testing", "-p", "no:cacheprovider"]
    options = ["--accel-stack", stack, "--accel-world", worlds, "--accel-simulate", "hccl"]
    result = subprocess.run(
        [*command, *options],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )

    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    # float64 alone: the chip lacks it
    assert "0 failed, 0 xfailed, 1 skipped" in result.stdout

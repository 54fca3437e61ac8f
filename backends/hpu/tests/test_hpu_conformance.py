"""The conformance kit on the simulated device, under a device type of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from accel_core.testing.simulated import write_distribution

HERE = Path(__file__).parent


def kit(folder: Path, *options: str) -> str:
    """What the kit prints; it must be green. `folder` declares the simulated plugin."""
    card = "[accel_core.device]\nhpu-simulated = simulated_hpu_card:CARD\n"
    write_distribution(folder, "accel-hpu-simulated", card)
    path = os.pathsep.join(map(str, (folder, HERE, HERE / "stub")))
    command = [sys.executable, "-m", "pytest", "--pyargs", "accel_core.testing", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [*command, *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    return result.stdout


def test_the_package_itself_conforms(tmp_path: Path) -> None:
    known = tmp_path / "xfails.txt"
    known.write_text(
        "test_0_packaging.py::test_the_stack_binds  # torch lends the name hpu to no simulation\n"
    )

    printed = kit(
        tmp_path,
        *("--accel-stack", "hpu", "--accel-level", "0"),
        *("--accel-simulate", "simccl", "--accel-xfails", str(known)),
    )

    assert "1 xfailed, 0 skipped" in printed


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("stack", "worlds"),
    [("hpu-simulated+bf16", "1"), pytest.param("hpu-simulated+ddp", "1,2", marks=pytest.mark.together)],
)
def test_its_code_conforms_on_the_simulated_device(tmp_path: Path, stack: str, worlds: str) -> None:
    printed = kit(tmp_path, "--accel-stack", stack, "--accel-world", worlds, "--accel-level", "1,2,3")

    assert "0 failed, 0 xfailed" in printed

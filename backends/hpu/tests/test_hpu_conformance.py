"""The conformance kit on the simulated device, under a type of its own, for want of the hardware."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel_core.testing import conform
from accel_core.testing.simulated import write_distribution

HERE = Path(__file__).parent
PATH = [HERE, HERE / "stub"]


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder that declares the plugin's card as it is on the simulated device."""
    card = "[accel_core.device]\nhpu-simulated = simulated_hpu_card:CARD\n"
    write_distribution(tmp_path, "accel-hpu-simulated", card)
    return tmp_path


def test_the_package_itself_conforms(site: Path) -> None:
    known = site / "xfails.txt"
    known.write_text(
        "test_0_packaging.py::test_the_stack_binds  # torch lends the name hpu to no simulation\n"
    )

    printed = conform(
        site,
        "hpu",
        *("--accel-level", "0", "--accel-simulate", "simccl", "--accel-xfails", str(known)),
        path=PATH,
    )

    assert "1 xfailed, 0 skipped" in printed


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("stack", "worlds"),
    [("hpu-simulated+bf16", "1"), pytest.param("hpu-simulated+ddp", "1,2", marks=pytest.mark.together)],
)
def test_its_code_conforms_on_the_simulated_device(site: Path, stack: str, worlds: str) -> None:
    printed = conform(site, stack, "--accel-world", worlds, "--accel-level", "1,2,3,4", path=PATH)

    assert "0 failed, 0 xfailed" in printed

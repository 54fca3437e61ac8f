"""The probe and the count, on made-up machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel_core import install_hint
from accel_npu import machine
from accel_npu.machine import chip_count, probe


class Machine:
    """/dev and /usr of a made-up machine, and its installed versions."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.versions = {"torch": "2.13.0+cpu", "torch_npu": "2.13.0"}

    def chips(self, count: int) -> Machine:
        (self.root / "dev").mkdir(exist_ok=True)
        for name in ["davinci_manager", *(f"davinci{index}" for index in range(count))]:
            (self.root / "dev" / name).touch()
        return self

    def toolkit(self, folder: str = "usr/local/Ascend/ascend-toolkit/latest") -> Machine:
        library = self.root / folder / "lib64" / "libascendcl.so"
        library.parent.mkdir(parents=True)
        library.touch()
        return self


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path)
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.setattr(machine, "_version", made.versions.get)
    for variable in (machine.VISIBLE, "LD_LIBRARY_PATH", "ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"):
        monkeypatch.delenv(variable, raising=False)
    return made


def test_a_machine_with_library_toolkit_and_chips_is_usable(here: Machine) -> None:
    here.toolkit().chips(8)

    assert probe() is None


def test_without_torch_npu_the_reason_says_what_to_install(here: Machine) -> None:
    del here.versions["torch_npu"]

    assert probe() == f"torch_npu is not installed; {install_hint('backends/npu[runtime]')}"


def test_a_torch_npu_for_another_torch_is_told(here: Machine) -> None:
    here.versions["torch"] = "2.9.1"

    assert "torch_npu 2.13.0 was not built for torch 2.9.1" in (probe() or "")


def test_without_the_toolkit_the_reason_names_its_library(here: Machine) -> None:
    here.chips(8)

    assert "CANN's libascendcl.so is not found" in (probe() or "")


@pytest.mark.parametrize("variable", ["ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "LD_LIBRARY_PATH"])
def test_the_toolkit_is_found_where_set_env_points(
    here: Machine, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    here.toolkit("opt/cann").chips(1)
    home = here.root / "opt/cann"
    monkeypatch.setenv(variable, str(home / "lib64" if variable == "LD_LIBRARY_PATH" else home))

    assert probe() is None


def test_a_container_without_chips_is_told(here: Machine) -> None:
    here.toolkit().chips(0)

    assert "is given no NPU" in (probe() or "")


def test_a_mask_that_hides_all_chips_is_told(here: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    here.toolkit().chips(8)
    monkeypatch.setenv(machine.VISIBLE, "")

    assert probe() == "ASCEND_RT_VISIBLE_DEVICES='' hides every NPU"


@pytest.mark.parametrize(
    ("mask", "count"),
    [
        (None, 4),
        ("0,1", 2),
        ("1,3", 2),
        ("2,9", 1),
        ("", 0),
        ("1,0", 0),
        ("1,1", 0),
        ("0,1,x", 2),
        ("0,,1", 1),
    ],
)
def test_chips_are_counted_as_torch_npu_counts_them(
    here: Machine, monkeypatch: pytest.MonkeyPatch, mask: str | None, count: int
) -> None:
    here.chips(4)
    if mask is not None:
        monkeypatch.setenv(machine.VISIBLE, mask)

    assert chip_count() == count
    assert machine.visible_devices(None) == count  # type: ignore[arg-type]

"""The probe and the count, on made-up machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel_mlu import card
from accel_mlu.card import device_count, probe


class Machine:
    """/dev and /usr of a made-up machine, and its installed versions."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.versions = {"torch": "2.13.0", "torch_mlu": "1.30.0+torch2.13.0"}

    def mlus(self, count: int) -> Machine:
        (self.root / "dev").mkdir(exist_ok=True)
        for name in [
            "cambricon_ctl",
            "cambricon_ipcm0",
            *(f"cambricon_dev{index}" for index in range(count)),
        ]:
            (self.root / "dev" / name).touch()
        return self

    def toolkit(self, folder: str = "usr/local/neuware") -> Machine:
        library = self.root / folder / "lib64" / "libcnrt.so"
        library.parent.mkdir(parents=True)
        library.touch()
        return self


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path)
    monkeypatch.setattr(card, "ROOT", tmp_path)
    monkeypatch.setattr(card, "_version", made.versions.get)
    for variable in (card.VISIBLE, "LD_LIBRARY_PATH", "NEUWARE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    return made


def test_a_machine_with_library_toolkit_and_mlus_is_usable(here: Machine) -> None:
    here.toolkit().mlus(8)

    assert probe() is None


def test_without_torch_mlu_the_reason_says_where_it_is(here: Machine) -> None:
    del here.versions["torch_mlu"]

    assert "torch_mlu is not installed; its source is at" in (probe() or "")


@pytest.mark.parametrize("torch", ["2.9.1", None])
def test_a_torch_mlu_for_another_torch_is_told(here: Machine, torch: str | None) -> None:
    here.versions["torch"] = torch  # type: ignore[assignment]

    assert f"torch_mlu 1.30.0+torch2.13.0 was not built for torch {torch}" in (probe() or "")


def test_a_version_that_names_no_torch_is_taken(here: Machine) -> None:
    here.toolkit().mlus(1).versions["torch_mlu"] = "1.30.0"

    assert probe() is None


def test_without_the_toolkit_the_reason_names_its_library(here: Machine) -> None:
    here.mlus(8)

    assert "Cambricon's libcnrt.so is not found" in (probe() or "")


@pytest.mark.parametrize("variable", ["NEUWARE_HOME", "LD_LIBRARY_PATH"])
def test_the_toolkit_is_found_where_the_environment_points(
    here: Machine, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    here.toolkit("opt/neuware").mlus(1)
    home = here.root / "opt/neuware"
    monkeypatch.setenv(variable, str(home / "lib64" if variable == "LD_LIBRARY_PATH" else home))

    assert probe() is None


def test_a_container_without_mlus_is_told(here: Machine) -> None:
    here.toolkit().mlus(0)

    assert "is given no MLU" in (probe() or "")


def test_a_mask_that_hides_all_mlus_is_told(here: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    here.toolkit().mlus(8)
    monkeypatch.setenv(card.VISIBLE, "")

    assert probe() == "MLU_VISIBLE_DEVICES='' hides every MLU"


@pytest.mark.parametrize(
    ("mask", "count"),
    [(None, 4), ("0,1", 2), ("1, 3", 2), ("3,0", 2), ("2,9,1", 1), ("", 0), ("-1", 0), ("0,x,1", 1)],
)
def test_mlus_are_counted_up_to_the_first_entry_that_is_none(
    here: Machine, monkeypatch: pytest.MonkeyPatch, mask: str | None, count: int
) -> None:
    here.mlus(4)
    if mask is not None:
        monkeypatch.setenv(card.VISIBLE, mask)

    assert device_count() == count
    assert card.visible_devices(None) == count  # type: ignore[arg-type]

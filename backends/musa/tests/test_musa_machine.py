"""The probe and the count, on made-up machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel_musa import card
from accel_musa.card import device_count, probe


class Machine:
    """/dev and /usr of a made-up machine, and its installed versions."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.versions = {"torch": "2.13.0", "torch_musa": "2.13.0+8b583b3"}

    def gpus(self, count: int) -> Machine:
        (self.root / "dev").mkdir(exist_ok=True)
        for name in ["mtgpu.ctl", "mtgpu_other", *(f"mtgpu.{index}" for index in range(count))]:
            (self.root / "dev" / name).touch()
        return self

    def sdk(self, folder: str = "usr/local/musa") -> Machine:
        library = self.root / folder / "lib" / "libmusart.so"
        library.parent.mkdir(parents=True)
        library.touch()
        return self


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path)
    monkeypatch.setattr(card, "ROOT", tmp_path)
    monkeypatch.setattr(card, "_version", made.versions.get)
    for variable in (card.VISIBLE, "LD_LIBRARY_PATH", "MUSA_HOME"):
        monkeypatch.delenv(variable, raising=False)
    return made


def test_a_machine_with_library_sdk_and_gpus_is_usable(here: Machine) -> None:
    here.sdk().gpus(8)

    assert probe() is None


def test_without_torch_musa_the_reason_says_where_it_is(here: Machine) -> None:
    del here.versions["torch_musa"]

    assert "torch_musa is not installed; its wheels are at github.com/MooreThreads" in (probe() or "")


@pytest.mark.parametrize("torch", ["2.9.1", None])
def test_a_torch_musa_for_another_torch_is_told(here: Machine, torch: str | None) -> None:
    here.versions["torch"] = torch  # type: ignore[assignment]

    assert f"torch_musa 2.13.0+8b583b3 was not built for torch {torch}" in (probe() or "")


def test_without_the_sdk_the_reason_names_its_library(here: Machine) -> None:
    here.gpus(8)

    assert "the MUSA SDK's libmusart.so is not found" in (probe() or "")


@pytest.mark.parametrize("variable", ["MUSA_HOME", "LD_LIBRARY_PATH"])
def test_the_sdk_is_found_where_the_environment_points(
    here: Machine, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    here.sdk("opt/musa").gpus(1)
    home = here.root / "opt/musa"
    monkeypatch.setenv(variable, str(home / "lib" if variable == "LD_LIBRARY_PATH" else home))

    assert probe() is None


def test_a_container_without_gpus_is_told(here: Machine) -> None:
    here.sdk().gpus(0)

    assert "is given no Moore Threads GPU" in (probe() or "")


def test_a_mask_that_hides_all_gpus_is_told(here: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    here.sdk().gpus(8)
    monkeypatch.setenv(card.VISIBLE, "")

    assert probe() == "MUSA_VISIBLE_DEVICES='' hides every GPU"


@pytest.mark.parametrize(
    ("mask", "count"),
    [(None, 4), ("0,1", 2), ("1, 3", 2), ("3,0", 2), ("2,9,1", 1), ("", 0), ("-1", 0), ("0,x,1", 1)],
)
def test_gpus_are_counted_up_to_the_first_entry_that_is_none(
    here: Machine, monkeypatch: pytest.MonkeyPatch, mask: str | None, count: int
) -> None:
    here.gpus(4)
    if mask is not None:
        monkeypatch.setenv(card.VISIBLE, mask)

    assert device_count() == count
    assert card.visible_devices(None) == count  # type: ignore[arg-type]

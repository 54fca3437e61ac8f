"""The probe and the count on made-up machines, and what the plugin asks of torch_sdaa.

Its calls are recorded in vendor.json, as Accelerate and DeepSpeed make them: its own source is not public.
"""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accel_sdaa import card, device
from accel_sdaa.card import VISIBLE, device_count, probe
from accel_sdaa.device import SdaaDevice, verify
from accel_testing import hold_to_signatures

VENDOR = Path(__file__).with_name("vendor.json")
RECORD = json.loads(VENDOR.read_text())
DEVICE = torch.device("cpu")  # only handed through

# -- the probe -----------------------------------------------------------------------------------


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """/dev of a made-up machine with four devices, on which torch_sdaa is installed."""
    folder = tmp_path / "dev"
    folder.mkdir()
    for name in ["tcaicard_ctl", *(f"tcaicard{index}" for index in range(4))]:
        (folder / name).touch()
    monkeypatch.setattr(card, "NODES", folder)
    monkeypatch.setattr(card, "find_spec", lambda _: object())
    monkeypatch.delenv(VISIBLE, raising=False)
    return folder


def test_a_machine_with_library_and_devices_is_usable(nodes: Path) -> None:
    assert probe() is None


def test_without_torch_sdaa_the_reason_says_so(nodes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "find_spec", lambda _: None)

    assert "torch_sdaa is not installed" in (probe() or "")


def test_a_container_without_devices_is_told(nodes: Path) -> None:
    for node in nodes.glob("tcaicard[0-9]"):
        node.unlink()

    assert f"is given no SDAA device (no {nodes}/tcaicard0)" in (probe() or "")


def test_a_mask_that_hides_all_devices_is_told(nodes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "")

    assert probe() == "SDAA_VISIBLE_DEVICES='' hides every SDAA device"


@pytest.mark.parametrize(("mask", "count"), [(None, 4), ("0,1", 2), ("16", 1), ("", 0), ("0,1,2,3,4", 4)])
def test_devices_are_counted(
    nodes: Path, monkeypatch: pytest.MonkeyPatch, mask: str | None, count: int
) -> None:
    if mask is not None:
        monkeypatch.setenv(VISIBLE, mask)

    assert device_count() == count
    assert card.visible_devices(None) == count  # type: ignore[arg-type]


def test_the_card_says_that_it_is_unverified() -> None:
    assert "unverified" in card.SDAA.summary


# -- the device ----------------------------------------------------------------------------------


def chip(**answers: Any) -> SimpleNamespace:
    """torch.sdaa with some of its functions, which refuse what nobody asks of the real ones."""
    made = SimpleNamespace(
        **{name: lambda *_, answer=answer, **__: answer for name, answer in answers.items()}
    )
    hold_to_signatures(made, VENDOR, answers)
    return made


def plugin(monkeypatch: pytest.MonkeyPatch, **answers: Any) -> SdaaDevice:
    monkeypatch.setattr(device, "vendor", lambda: chip(**answers))
    run: Any = SimpleNamespace()
    made = SdaaDevice(None, run)
    made.below = SimpleNamespace(capabilities=lambda _: frozenset({"bf16", "fp16"}))
    return made


@pytest.mark.parametrize(("has", "able"), [(True, {"bf16", "fp16"}), (False, {"fp16"})])
def test_bf16_depends_on_the_chip(monkeypatch: pytest.MonkeyPatch, has: bool, able: set[str]) -> None:
    assert plugin(monkeypatch, is_bf16_supported=has).capabilities(DEVICE) == able


@pytest.mark.parametrize(("count", "listed"), [(4, {"SDAA": "4 x /dev/tcaicard0"}), (0, {})])
def test_a_report_for_maintainers_lists_the_devices(
    monkeypatch: pytest.MonkeyPatch, count: int, listed: dict[str, str]
) -> None:
    monkeypatch.setenv(VISIBLE, "0")

    plugin(monkeypatch, device_count=count, get_device_name="/dev/tcaicard0")

    report = device.environment_report()

    assert report == {VISIBLE: "0", **listed}


@pytest.mark.parametrize(("available", "said"), [(True, None), (False, "finds no usable device; teco-smi")])
def test_a_library_without_a_usable_device_is_told(
    monkeypatch: pytest.MonkeyPatch, available: bool, said: str | None
) -> None:
    monkeypatch.setattr(device, "vendor", lambda: chip(is_available=available))

    told = verify()

    assert told is None if said is None else said in (told or "")


# -- the record ----------------------------------------------------------------------------------


def source(file: str) -> str:
    """Read a file of an installed library; skip where it is not installed."""
    path = Path(sysconfig.get_path("purelib"), file)
    if not path.exists():
        pytest.skip(f"{file.partition('/')[0]} is not installed")
    return path.read_text()


@pytest.mark.parametrize("file", RECORD["texts"])
def test_the_libraries_that_know_the_device_ask_it_as_recorded(file: str) -> None:
    text = source(file)

    assert [words for words in RECORD["texts"][file] if words not in text] == []


def test_every_recorded_function_is_called_in_a_recorded_line() -> None:
    lines = " ".join(text for texts in RECORD["texts"].values() for text in texts)
    functions = {name for named in RECORD["functions"].values() for name in named}

    assert sorted(name for name in functions if f"torch.sdaa.{name}(" not in lines) == []

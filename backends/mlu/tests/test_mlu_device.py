"""What the plugin asks of torch_mlu, held to the signatures recorded from torch_mlu's own source.

`python tools/vendor_signatures.py backends/mlu/tests/vendor.json CLONE` makes the record.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accel_mlu import MluConfig, device
from accel_mlu.card import VISIBLE
from accel_mlu.device import MluDevice, verify
from accel_testing import hold_to_signatures

VENDOR = Path(__file__).with_name("vendor.json")
DEVICE = torch.device("cpu")  # only handed through


def chip(**answers: Any) -> SimpleNamespace:
    """torch.mlu with some of its functions, which refuse what the real ones would refuse."""
    made = SimpleNamespace(
        **{name: lambda *_, answer=answer, **__: answer for name, answer in answers.items()}
    )
    hold_to_signatures(made, VENDOR, answers)
    return made


@pytest.fixture
def switches(monkeypatch: pytest.MonkeyPatch) -> tuple[SimpleNamespace, SimpleNamespace]:
    """Those of matrix products, and of convolutions."""
    made = SimpleNamespace(allow_tf32="as it was"), SimpleNamespace(allow_tf32="as it was")
    monkeypatch.setattr(torch.backends, "mlu", SimpleNamespace(matmul=made[0]), raising=False)
    monkeypatch.setattr(torch.backends, "cnnl", made[1], raising=False)
    return made


def plugin(monkeypatch: pytest.MonkeyPatch, config: MluConfig | None = None, **answers: Any) -> MluDevice:
    monkeypatch.setattr(device, "vendor", lambda: chip(**answers))
    monkeypatch.setattr(device.metadata, "version", {"torch_mlu": "1.30.0+torch2.13.0"}.__getitem__)
    run: Any = SimpleNamespace()
    made = MluDevice(config, run)
    made.below = SimpleNamespace(
        select_device=lambda _: DEVICE, capabilities=lambda _: frozenset({"bf16", "fp16"})
    )
    return made


@pytest.mark.parametrize(("has", "able"), [(True, {"bf16", "fp16"}), (False, {"fp16"})])
def test_bf16_depends_on_the_chip(monkeypatch: pytest.MonkeyPatch, has: bool, able: set[str]) -> None:
    assert plugin(monkeypatch, is_bf16_supported=has).capabilities(DEVICE) == able


@pytest.mark.parametrize("allowed", [True, False])
def test_tf32_is_switched_when_the_device_is_selected(
    monkeypatch: pytest.MonkeyPatch, switches: tuple[SimpleNamespace, SimpleNamespace], allowed: bool
) -> None:
    plugin(monkeypatch, MluConfig(allow_tf32=allowed)).select_device(None)  # type: ignore[arg-type]

    assert [switch.allow_tf32 for switch in switches] == [allowed, allowed]


def test_tf32_that_nobody_named_stays_as_it_was(
    monkeypatch: pytest.MonkeyPatch, switches: tuple[SimpleNamespace, SimpleNamespace]
) -> None:
    plugin(monkeypatch).select_device(None)  # type: ignore[arg-type]

    assert [switch.allow_tf32 for switch in switches] == ["as it was", "as it was"]


def test_a_report_for_maintainers_lists_the_mlus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "0")
    about = SimpleNamespace(name="MLU590-M9", major=5, minor=0)

    plugin(monkeypatch, device_count=1, get_device_properties=about)

    report = device.environment_report()

    assert report == {"torch_mlu": "1.30.0+torch2.13.0", VISIBLE: "0", "MLU 0": "MLU590-M9, capability 5.0"}


# -- verify --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("available", "said"), [(True, None), (False, "finds no usable MLU; cnmon")])
def test_a_library_without_a_usable_mlu_is_told(
    monkeypatch: pytest.MonkeyPatch, available: bool, said: str | None
) -> None:
    monkeypatch.setattr(device, "vendor", lambda: chip(is_available=available))

    told = verify()

    assert told is None if said is None else said in (told or "")


# -- the record ----------------------------------------------------------------------------------


def test_a_call_that_torch_mlu_would_refuse_is_refused_here() -> None:
    with pytest.raises(TypeError):
        chip(is_bf16_supported=True).is_bf16_supported(including_emulation=False)


def test_a_function_that_torch_mlu_lacks_is_missed() -> None:
    with pytest.raises(KeyError, match="is_fp8_supported"):
        chip(is_fp8_supported=True)

"""What the plugin asks of torch_musa, held to the signatures recorded from torch_musa's own source.

`python tools/vendor_signatures.py backends/musa/tests/vendor.json CLONE` makes the record.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accel_core import RunConfig, World
from accel_musa import MusaConfig, device
from accel_musa.card import VISIBLE
from accel_musa.device import MusaDevice, verify
from accel_testing import hold_to_signatures

VENDOR = Path(__file__).with_name("vendor.json")
DEVICE = torch.device("cpu")  # only handed through


def chip(**answers: Any) -> SimpleNamespace:
    """torch.musa with some of its functions, which refuse what the real ones would refuse."""
    made = SimpleNamespace(
        **{name: lambda *_, answer=answer, **__: answer for name, answer in answers.items()}
    )
    hold_to_signatures(made, VENDOR, answers)
    return made


@pytest.fixture
def mudnn(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    made = SimpleNamespace(allow_tf32=True)
    monkeypatch.setattr(torch.backends, "mudnn", made, raising=False)
    return made


def plugin(monkeypatch: pytest.MonkeyPatch, config: MusaConfig | None = None, **answers: Any) -> MusaDevice:
    monkeypatch.setattr(device, "vendor", lambda: chip(**answers))
    monkeypatch.setattr(device.metadata, "version", {"torch_musa": "2.13.0"}.__getitem__)
    run: Any = SimpleNamespace()
    made = MusaDevice(config, run)
    made.below = SimpleNamespace(
        select_device=lambda _: DEVICE, capabilities=lambda _: frozenset({"bf16", "fp16"})
    )
    return made


@pytest.mark.parametrize(("native", "able"), [(True, {"bf16", "fp16"}), (False, {"fp16"})])
def test_bf16_depends_on_the_chip(monkeypatch: pytest.MonkeyPatch, native: bool, able: set[str]) -> None:
    assert plugin(monkeypatch, is_bf16_supported=native).capabilities(DEVICE) == able


def test_emulated_bf16_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    made = plugin(monkeypatch)
    made.musa.is_bf16_supported = lambda including_emulation=True: asked.append(including_emulation)

    made.capabilities(DEVICE)

    assert asked == [False]


@pytest.mark.parametrize("allowed", [True, False])
def test_tf32_is_switched_when_the_device_is_selected(
    monkeypatch: pytest.MonkeyPatch, mudnn: SimpleNamespace, allowed: bool
) -> None:
    mudnn.allow_tf32 = not allowed
    plugin(monkeypatch, MusaConfig(allow_tf32=allowed)).select_device(None)  # type: ignore[arg-type]

    assert mudnn.allow_tf32 is allowed


def test_tf32_that_nobody_named_stays_as_it_was(
    monkeypatch: pytest.MonkeyPatch, mudnn: SimpleNamespace
) -> None:
    mudnn.allow_tf32 = "as it was"
    plugin(monkeypatch).select_device(None)  # type: ignore[arg-type]

    assert mudnn.allow_tf32 == "as it was"


def test_a_build_without_mccl_is_an_error_even_where_torch_says_it_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "is_mccl_available", lambda: True, raising=False)

    made = plugin(monkeypatch)
    made.run.world = World(size=2)
    (reason,) = made.refuse(RunConfig())
    assert reason.startswith("torch_musa 2.13.0 was built without MCCL")
    assert reason.endswith("accel launch -n 1")


def test_a_report_for_maintainers_lists_gpus_and_how_float32_is_computed(
    monkeypatch: pytest.MonkeyPatch, mudnn: SimpleNamespace
) -> None:
    monkeypatch.setenv(VISIBLE, "0")
    about = SimpleNamespace(name="MTT S4000", major=2, minor=2)

    plugin(monkeypatch, device_count=1, get_device_properties=about)

    report = device.environment_report()

    assert report == {
        "torch_musa": "2.13.0",
        VISIBLE: "0",
        "TF32 for float32": "True",
        "MUSA 0": "MTT S4000, capability 2.2",
    }


# -- verify --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("available", "said"), [(True, None), (False, "finds no usable GPU; mthreads-gmi")])
def test_a_library_without_a_usable_gpu_is_told(
    monkeypatch: pytest.MonkeyPatch, available: bool, said: str | None
) -> None:
    monkeypatch.setattr(device, "vendor", lambda: chip(is_available=available))

    told = verify()

    assert told is None if said is None else said in (told or "")


def test_a_library_that_does_not_load_is_told_with_the_cause_and_not_with_the_vendors_guess(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch_musa.py").write_text(
        "try:\n    raise ImportError('libmusart.so.4: cannot open shared object file')\n"
        "except ImportError as error:\n"
        "    raise ImportError('Please try running Python from a different directory!') from error\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch_musa", raising=False)

    assert verify() == "torch_musa does not load: libmusart.so.4: cannot open shared object file"


# -- the record ----------------------------------------------------------------------------------


def test_a_call_that_torch_musa_would_refuse_is_refused_here() -> None:
    with pytest.raises(TypeError):
        chip(is_bf16_supported=True).is_bf16_supported(emulated=False)


def test_a_function_that_torch_musa_lacks_is_missed() -> None:
    with pytest.raises(KeyError, match="is_fp8_supported"):
        chip(is_fp8_supported=True)

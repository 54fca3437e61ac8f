"""The probe on made-up machines, and what the plugin asks of torch.mps."""

from __future__ import annotations

import platform
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accel_core import ConfigError, World
from accel_mps import MpsConfig, device, machine
from accel_mps.device import MpsDevice, verify
from accel_mps.machine import probe
from accel_testing import Recorder

DEVICE = torch.device("mps", 0)


def plugin(config: MpsConfig | None = None, **below: Any) -> MpsDevice:
    run: Any = SimpleNamespace()
    made = MpsDevice(config, run)
    made.below = SimpleNamespace(**{"select_device": lambda _: DEVICE, **below})
    return made


# -- the probe -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("system", "machine", "release", "reason"),
    [
        ("Darwin", "arm64", "15.1", None),
        ("Linux", "x86_64", "", "this is Linux, not macOS"),
        ("Darwin", "x86_64", "15.1", "use an arm64 Python"),
        ("Darwin", "arm64", "13.6", "macOS 13.6 is too old"),
    ],
)
def test_the_reason_is_in_words(
    monkeypatch: pytest.MonkeyPatch, system: str, machine: str, release: str, reason: str | None
) -> None:
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(platform, "mac_ver", lambda: (release, ("", "", ""), machine))

    found = probe()

    assert found is None if reason is None else reason in (found or "")


@pytest.mark.parametrize(
    ("built", "reason"),
    [(False, "built without Metal"), (True, "Metal offers no GPU")],
    ids=["cpu", "no gpu"],
)
def test_a_gpu_that_torch_cannot_use_is_told(
    monkeypatch: pytest.MonkeyPatch, built: bool, reason: str
) -> None:
    metal = Recorder(monkeypatch, torch.backends.mps)
    metal.answers("is_available", answer=False)
    metal.answers("is_built", built)

    assert reason in (verify() or "")


# -- the launcher --------------------------------------------------------------------------------


def test_one_process_is_what_a_mac_gets() -> None:
    assert machine.visible_devices(SimpleNamespace()) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "variables"),
    [(MpsConfig(cpu_fallback=True), {"PYTORCH_ENABLE_MPS_FALLBACK": "1"}), (MpsConfig(), {}), (None, {})],
)
def test_the_fallback_is_told_to_torch_before_it_is_imported(
    config: MpsConfig | None, variables: dict[str, str]
) -> None:
    run: Any = SimpleNamespace(plugins={} if config is None else {"mps": config})

    assert machine.launch_environment(run, World()) == variables


# -- the device ----------------------------------------------------------------------------------


def test_several_processes_are_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"has 2: .*\nstart one process \(accel launch -n 1\)"):
        plugin().select_device(World(size=2))


def test_the_memory_limit_is_set_when_the_device_is_selected(mps: Recorder) -> None:
    mps.answers("set_per_process_memory_fraction", None)

    assert plugin(MpsConfig(memory_fraction=0.5)).select_device(World()) == DEVICE
    assert mps.calls == [("set_per_process_memory_fraction", (0.5,))]


def test_memory_is_told_in_cores_words(mps: Recorder) -> None:
    mps.answers("current_allocated_memory", 1)
    mps.answers("driver_allocated_memory", 2)
    mps.answers("recommended_max_memory", 3)

    assert plugin().memory_stats(DEVICE) == {"allocated": 1, "reserved": 2, "total": 3, "free": 2}


@pytest.mark.parametrize(
    ("named", "said"), [(True, "Apple M4"), (False, "arm64")], ids=["today", "torch 2.8"]
)
def test_the_report_names_the_gpu_as_far_as_torch_knows_it(
    monkeypatch: pytest.MonkeyPatch, mps: Recorder, named: bool, said: str
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "get_name", lambda: "Apple M4", raising=False)
    if not named:
        monkeypatch.delattr(torch.backends.mps, "get_name")
    mps.answers("recommended_max_memory", 12 * 2**30)

    assert device.environment_report()["Apple GPU"] == f"{said}, 12.0 GiB recommended"


@pytest.mark.parametrize(("found", "refused"), [("0", True), ("1", False)])
def test_a_fallback_that_a_variable_of_the_user_forbids_is_refused(
    monkeypatch: pytest.MonkeyPatch, found: str, refused: bool
) -> None:
    monkeypatch.setenv("PYTORCH_ENABLE_MPS_FALLBACK", found)
    config: Any = None
    said = plugin(MpsConfig(cpu_fallback=True)).refuse(config)

    assert bool(said) == refused
    assert not refused or "PYTORCH_ENABLE_MPS_FALLBACK='0'" in said[0]

"""The probe, the count and the variables, on made-up machines. Needs no torch_xla."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from accel_xla import SpmdConfig, XlaConfig, machine
from accel_xla.machine import chip_count, hardware, probe

VARIABLES = (
    *(machine.DEVICE, machine.TPU_MASK, "TPU_PROCESS_BOUNDS"),
    *("NEURON_RT_NUM_CORES", "NEURON_RT_VISIBLE_CORES"),
)


class Machine:
    """/dev and /sys of a made-up machine, and its installed versions."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.versions = {"torch": "2.9.0+cpu", "torch_xla": "2.9.0"}

    def pci(self, vendor: str, device: str) -> Machine:
        bus = self.root / "sys/bus/pci/devices"
        folder = bus / f"0000:00:{len([*bus.glob('*')]):02d}.0"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "device").write_text(f"{device}\n")
        return self

    def tpus(self, count: int) -> Machine:
        for _ in range(count):
            self.pci(machine.GOOGLE, "0x0063")
        return self


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path)
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.setattr(machine, "_version", made.versions.get)
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    return made


def config(strategy: str = "auto", **sections: Any) -> Any:
    named = {name.replace("_", "-"): section for name, section in sections.items()}
    return SimpleNamespace(strategy=strategy, plugins=named)


def test_a_pair_of_one_version_is_usable(here: Machine) -> None:
    assert probe() is None


def test_without_torch_xla_the_reason_says_what_to_install(here: Machine) -> None:
    del here.versions["torch_xla"]

    assert probe() == "torch-xla is not installed; pip install 'torch==2.9.*' 'torch-xla==2.9.*'"


def test_on_a_tpu_host_that_includes_its_driver(here: Machine) -> None:
    del here.tpus(1).versions["torch_xla"]

    assert "'torch-xla[tpu]==2.9.*'" in (probe() or "")


def test_a_torch_that_torch_xla_was_never_released_for_gets_the_last_pair(here: Machine) -> None:
    del here.versions["torch_xla"]
    here.versions["torch"] = "2.13.0"

    assert "'torch==2.9.*' 'torch-xla==2.9.*'" in (probe() or "")


def test_an_older_torch_gets_its_own_pair(here: Machine) -> None:
    here.versions["torch"] = "2.8.0a0+vendor"

    assert probe() == (
        "torch-xla 2.9.0 was not built for torch 2.8.0a0+vendor;"
        " pip install 'torch==2.8.*' 'torch-xla==2.8.*'"
    )


def test_tpus_are_counted_on_the_bus(here: Machine) -> None:
    here.tpus(4).pci(machine.GOOGLE, "0xffff").pci("0x10de", "0x2330")

    assert hardware() == "TPU"
    assert chip_count() == 4
    assert machine.visible_devices(config()) == 4


def test_a_mask_is_for_one_process(here: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    here.tpus(4)
    monkeypatch.setenv("TPU_VISIBLE_CHIPS", "0,2")

    assert chip_count() == 1


@pytest.mark.parametrize(("bounds", "processes"), [("1,1,1", 1), ("2,1,1", 2), ("2,4,1", 4)])
def test_bounds_of_the_topology_limit_processes(
    here: Machine, monkeypatch: pytest.MonkeyPatch, bounds: str, processes: int
) -> None:
    here.tpus(4)
    monkeypatch.setenv("TPU_PROCESS_BOUNDS", bounds)

    assert chip_count() == processes


@pytest.mark.parametrize(
    ("variables", "cores"),
    [
        ({}, 4),
        ({"NEURON_RT_NUM_CORES": "3"}, 3),
        ({"NEURON_RT_VISIBLE_CORES": "0-2,7"}, 4),
        ({"NEURON_RT_VISIBLE_CORES": "5"}, 1),
    ],
    ids=["all", "number", "list", "one"],
)
def test_neuron_cores_are_those_a_process_may_use(
    here: Machine, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], cores: int
) -> None:
    (here.root / "dev").mkdir()
    (here.root / "dev/neuron0").touch()
    for number in range(2):
        count = here.root / machine.NEURONS / f"neuron{number}/core_count"
        count.parent.mkdir(parents=True)
        count.write_text("2\n")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    assert hardware() == "NEURON"
    assert machine.visible_devices(config()) == cores


def test_spmd_is_one_process_however_many_devices(here: Machine) -> None:
    here.tpus(4)

    assert machine.visible_devices(config("xla-spmd")) == 1


def test_the_cpu_device_serves_one_process(here: Machine) -> None:
    assert (hardware(), chip_count()) == (None, 1)


def test_the_hardware_found_is_named_to_torch_xla(here: Machine) -> None:
    here.tpus(1)

    assert machine.launch_environment(config(), None) == {"PJRT_DEVICE": "TPU"}  # type: ignore[arg-type]


def test_without_hardware_nothing_is_named_for_the_user(here: Machine) -> None:
    assert machine.launch_environment(config(), None) == {}  # type: ignore[arg-type]


def test_the_cpu_device_is_used_when_named(here: Machine) -> None:
    named = config(xla=XlaConfig(pjrt_device="CPU"))

    assert machine.launch_environment(named, None) == {"PJRT_DEVICE": "CPU"}  # type: ignore[arg-type]


@pytest.mark.parametrize(("devices", "found"), [(4, {"CPU_NUM_DEVICES": "4"}), (None, {})])
def test_virtual_devices_are_asked_for_before_the_library_loads(
    devices: int | None, found: dict[str, str]
) -> None:
    named = config(xla_spmd=SpmdConfig(cpu_devices=devices))

    assert machine.spmd_environment(named, None) == found  # type: ignore[arg-type]

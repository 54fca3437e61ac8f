"""What a GPU's sensors tell: NVIDIA's own library, with stand-ins for the calls that need a driver."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accel_core import World
from accel_cuda import health
from accel_cuda.device import CudaDevice
from accel_cuda.health import Health
from accel_testing import Recorder
from accel_testing.patience import patience

DEVICE = torch.device("cuda", 0)
SAID = {
    "temperature": 71,
    "power": 412.5,
    "clock": 1530,
    "busy": 0.97,
    "throttled": ["sw_power_cap", "hw_thermal_slowdown"],
    "memory_errors": 2,
}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of this machine are never late, however busy it is."""
    monkeypatch.setattr(health, "WAIT", 20)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch, cuda: Recorder) -> Recorder:
    """NVML with one hot H100 at an address."""
    pynvml = pytest.importorskip("pynvml")
    place = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    cuda.answers("get_device_properties", place)
    library = Recorder(monkeypatch, pynvml)
    library.answers("nvmlInit", None)
    library.answers("nvmlDeviceGetHandleByPciBusId", "the GPU")
    library.answers("nvmlDeviceGetTemperature", 71)
    library.answers("nvmlDeviceGetPowerUsage", 412_500)
    library.answers("nvmlDeviceGetClockInfo", 1530)
    library.answers("nvmlDeviceGetUtilizationRates", SimpleNamespace(gpu=97, memory=40))
    reasons = pynvml.nvmlClocksEventReasonSwPowerCap | pynvml.nvmlClocksEventReasonHwThermalSlowdown
    library.answers("nvmlDeviceGetCurrentClocksEventReasons", reasons | pynvml.nvmlClocksEventReasonGpuIdle)
    library.answers("nvmlDeviceGetTotalEccErrors", 2)
    return library


def raising(name: str) -> Any:
    """Return a function that raises this error of NVML."""
    import pynvml

    def fail(*_: Any) -> None:
        raise getattr(pynvml, name)

    return fail


def test_sensors_tell_in_the_hooks_units(nvml: Recorder) -> None:
    plugin = CudaDevice(None, SimpleNamespace(world=World(), device=DEVICE))  # type: ignore[arg-type]

    assert plugin.device_health(DEVICE) == SAID
    assert ("nvmlDeviceGetHandleByPciBusId", ("0000:1b:00.0",)) in nvml.calls


def test_the_library_is_opened_once(nvml: Recorder) -> None:
    sensors = Health(DEVICE)

    assert sensors.read() == sensors.read() == SAID
    assert [name for name, _ in nvml.calls].count("nvmlInit") == 1


def test_reasons_have_the_names_of_nvidia_smi() -> None:
    pynvml = pytest.importorskip("pynvml")
    bits = {value for name, value in vars(pynvml).items() if name.startswith("nvmlClocksEventReason")}

    assert bits - {
        pynvml.nvmlClocksEventReasonNone,
        pynvml.nvmlClocksEventReasonAll,
        pynvml.nvmlClocksEventReasonGpuIdle,
    } == {*health.REASONS}


@pytest.mark.parametrize("error", ["NVMLError_NotSupported", "NVMLError_FunctionNotFound"])
def test_a_sensor_that_the_gpu_lacks_is_left_out(nvml: Recorder, error: str) -> None:
    nvml.answers("nvmlDeviceGetTotalEccErrors", raising(error))

    with warnings.catch_warnings(action="error"):
        found = Health(DEVICE).read()

    assert found == {name: value for name, value in SAID.items() if name != "memory_errors"}


def test_a_sensor_that_fails_costs_its_own_value_and_one_warning(nvml: Recorder) -> None:
    nvml.answers("nvmlDeviceGetPowerUsage", raising("NVMLError_GpuIsLost"))
    sensors = Health(DEVICE)

    with pytest.warns(UserWarning, match="power: NVMLError_GpuIsLost: GPU is lost; training goes on") as seen:
        found = [sensors.read(), sensors.read()]

    assert len(seen) == 1
    assert found == [{name: value for name, value in SAID.items() if name != "power"}] * 2


def test_a_library_that_does_not_open_costs_one_warning(nvml: Recorder) -> None:
    nvml.answers("nvmlInit", raising("NVMLError_DriverNotLoaded"))
    sensors = Health(DEVICE)

    with pytest.warns(UserWarning, match="Driver Not Loaded") as seen:
        found = [sensors.read(), sensors.read()]

    assert (found, len(seen)) == ([{}, {}], 1)


def test_a_driver_that_does_not_answer_is_not_waited_for(
    nvml: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    sensors, answered = Health(DEVICE), threading.Event()
    nvml.answers("nvmlDeviceGetTemperature", lambda *_: answered.wait(patience(60)) and 71)
    answered.set()
    sensors.read()
    answered.clear()
    monkeypatch.setattr(health, "WAIT", 0.01)

    with pytest.warns(UserWarning, match=r"cuda:0: .* its driver did not answer in 0\.01 s") as seen:
        found = [sensors.read(), sensors.read()]
    asked = [name for name, _ in nvml.calls].count("nvmlDeviceGetTemperature")
    answered.set()
    _ended(sensors)
    monkeypatch.setattr(health, "WAIT", 20)

    assert (found, len(seen), asked) == ([{}, {}], 1, 2)
    assert sensors.read() == SAID


def test_a_library_that_never_opens_costs_one_warning(
    nvml: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    sensors, opened = Health(DEVICE), threading.Event()
    nvml.answers("nvmlInit", lambda: opened.wait(patience(60)) and None)
    monkeypatch.setattr(health, "WAIT", 0.01)
    with warnings.catch_warnings(action="error"):
        found = [sensors.read(), sensors.read()]  # it may still open
    monkeypatch.setattr(health, "OPENING", 0)

    with pytest.warns(UserWarning, match="its driver did not answer in 0 s") as seen:
        found += [sensors.read(), sensors.read()]
    opened.set()
    _ended(sensors)

    assert (found, len(seen)) == ([{}] * 4, 1)


def _ended(sensors: Health) -> None:
    thread = sensors._thread
    assert thread is not None
    thread.join(patience(20))


def test_without_nvidias_library_there_is_nothing_and_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "find_spec", lambda _: None)

    with warnings.catch_warnings(action="error"):
        assert Health(DEVICE).read() == {}


def test_without_a_driver_there_is_nothing_and_no_warning(nvml: Recorder) -> None:
    nvml.answers("nvmlInit", raising("NVMLError_LibraryNotFound"))

    with warnings.catch_warnings(action="error"):
        assert Health(DEVICE).read() == {}


# -- AMD -----------------------------------------------------------------------------------------


@pytest.fixture
def amd(monkeypatch: pytest.MonkeyPatch, cuda: Recorder) -> Iterator[Recorder]:
    monkeypatch.setattr(torch.version, "hip", "7.1")
    monkeypatch.setattr(health, "find_spec", lambda name: {"amdsmi": object()}[name])
    cuda.answers("temperature", 64)
    cuda.answers("power_draw", 540)
    cuda.answers("clock_rate", 2100)
    cuda.answers("utilization", 88)
    return cuda


def test_amds_sensors_are_read_by_torch(amd: Recorder) -> None:
    assert Health(DEVICE).read() == {"temperature": 64, "power": 540, "clock": 2100, "busy": 0.88}
    assert all(arguments == (DEVICE,) for _, arguments in amd.calls)


def test_a_sensor_without_a_value_is_left_out(amd: Recorder) -> None:
    amd.answers("power_draw", 0)
    amd.answers("clock_rate", 0)

    assert Health(DEVICE).read() == {"temperature": 64, "busy": 0.88}


def test_a_sensor_that_amds_chip_lacks_is_left_out(amd: Recorder) -> None:
    class AmdSmiLibraryException(Exception):
        err_code = 2

    def fail(*_: Any) -> None:
        raise AmdSmiLibraryException

    amd.answers("temperature", fail)

    with warnings.catch_warnings(action="error"):
        assert "temperature" not in Health(DEVICE).read()

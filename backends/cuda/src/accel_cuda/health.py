"""Sensors of a GPU, read in a thread because a broken driver may never answer."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from threading import Thread
from typing import Any, Final

import torch

from accel_cuda.affinity import pci_address

__all__ = ["Health", "library"]

WAIT: Final = 0.005
"""Seconds that training waits for an answer."""
OPENING: Final = 60.0
"""Seconds that opening the library may take before a warning."""
REASONS: Final = {
    # bit of nvmlDeviceGetCurrentClocksEventReasons -> name in nvidia-smi --query-gpu=clocks_event_reasons.*
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clocks_setting",
}

Sensors = Mapping[str, Callable[[], Any]]


class Health:
    """Read the sensors of one GPU in a thread, for the hook `monitor.device_health`.

    Sensors that the GPU lacks are left out. Sensors that fail or answer too late are left out with one
    warning, and training goes on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sensors: Sensors | None = None
        """None until the library is open."""
        self._thread: Thread | None = None
        self._start = 0.0
        self._problems: list[str] = []
        self._has_warned = False

    def read(self) -> Mapping[str, Any]:
        """Return the current values of the sensors; empty if the driver does not answer within WAIT."""
        if self._thread is not None and self._thread.is_alive():
            # The thread of an earlier call still waits. Another thread per call would pile up threads.
            if time.monotonic() - self._start > OPENING:
                self._problems.append(f"its driver did not answer in {OPENING:g} s")
                self._warn()
            return {}
        values: dict[str, Any] = {}
        is_open, self._start = self._sensors is not None, time.monotonic()
        self._thread = Thread(target=self._read_sensors, args=(values,), daemon=True)
        self._thread.start()
        self._thread.join(WAIT)
        is_late = self._thread.is_alive()
        if is_late and is_open:  # opening the library takes longer than WAIT on any machine
            self._problems.append(f"its driver did not answer in {WAIT:g} s")
        self._warn()
        return {} if is_late else values

    def _warn(self) -> None:
        if self._problems and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{self._device}: the run's record lacks values of the GPU's sensors, {self._problems[0]};"
                " training goes on\nnvidia-smi, or amd-smi, says whether the driver answers",
                stacklevel=3,
            )

    def _read_sensors(self, values: dict[str, Any]) -> None:
        # Drivers raise errors of any class. Training must go on, so each becomes a part of the warning.
        try:
            if self._sensors is None:
                self._sensors = _amd(self._device) if torch.version.hip else _nvidia(self._device)
        except Exception as error:  # see above
            self._sensors = {}
            self._problems.append(f"{type(error).__name__}: {error}")
        for name, sensor in self._sensors.items():
            try:
                value = sensor()
            except Exception as error:  # see above
                if not _is_unsupported(error):
                    self._problems.append(f"{name}: {type(error).__name__}: {error}")
            else:
                if value is not None:
                    values[name] = value


def library() -> str:
    """Return the version of the library that reads NVIDIA's sensors, for `accel env`."""
    try:
        return f"nvidia-ml-py {metadata.version('nvidia-ml-py')}"
    except metadata.PackageNotFoundError:
        return "not read: pip install nvidia-ml-py"


def _nvidia(device: torch.device) -> Sensors:
    """Return the sensors that NVML reads.

    torch.cuda.temperature and similar functions are not used: they have neither throttling nor ECC errors,
    and open NVML in each call. The PCI address identifies the GPU under any CUDA_VISIBLE_DEVICES; for a MIG
    slice it identifies the whole GPU.
    """
    if find_spec("pynvml") is None:
        return {}
    import pynvml as nvml

    try:
        nvml.nvmlInit()
    except nvml.NVMLError_LibraryNotFound:  # the GPU is simulated, or a container hides the driver
        return {}
    gpu = nvml.nvmlDeviceGetHandleByPciBusId(pci_address(torch.cuda.get_device_properties(device)))
    uncorrected = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    return {
        "temperature": partial(nvml.nvmlDeviceGetTemperature, gpu, nvml.NVML_TEMPERATURE_GPU),
        "power": lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
        "clock": partial(nvml.nvmlDeviceGetClockInfo, gpu, nvml.NVML_CLOCK_SM),
        "busy": lambda: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
        "throttled": lambda: [*_reasons(nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu))],
        "memory_errors": partial(nvml.nvmlDeviceGetTotalEccErrors, gpu, uncorrected, nvml.NVML_VOLATILE_ECC),
    }


def _reasons(bits: int) -> Iterator[str]:
    return (name for bit, name in REASONS.items() if bits & bit)


def _amd(device: torch.device) -> Sensors:
    """Return the sensors that torch reads by ROCm's amdsmi."""
    if find_spec("amdsmi") is None:
        return {}
    cuda = torch.cuda
    return {
        "temperature": partial(cuda.temperature, device),
        # Watts, although torch documents milliwatts for NVIDIA. torch returns 0 if amdsmi has no value.
        "power": lambda: cuda.power_draw(device) or None,
        "clock": lambda: cuda.clock_rate(device) or None,
        "busy": lambda: cuda.utilization(device) / 100,
    }


def _is_unsupported(error: Exception) -> bool:
    """Return True if the error says that this GPU or its driver does not have the sensor."""
    is_amd = getattr(error, "err_code", None) in (2, 3)  # AMDSMI_STATUS_NOT_SUPPORTED, NOT_YET_IMPLEMENTED
    return is_amd or type(error).__name__ in ("NVMLError_NotSupported", "NVMLError_FunctionNotFound")

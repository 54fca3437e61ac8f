"""A GPU's sensors, read in a thread: a sick driver may never answer."""

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
"""Seconds that opening the library may take without a word."""
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

    A sensor that the GPU lacks is left out. One that fails, and an answer that comes late, are left out with
    one warning; training goes on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sensors: Sensors | None = None
        """None until the library is open."""
        self._thread: Thread | None = None
        self._asked = 0.0
        self._troubles: list[str] = []
        self._warned = False

    def read(self) -> Mapping[str, Any]:
        """Return what the sensors tell now; empty if they do not within WAIT."""
        if self._thread is not None and self._thread.is_alive():
            if time.monotonic() - self._asked > OPENING:
                self._troubles.append(f"its driver did not answer in {OPENING:g} s")
                self._warn()
            return {}  # of the question before: asking again would pile up threads
        found: dict[str, Any] = {}
        is_open, self._asked = self._sensors is not None, time.monotonic()
        self._thread = Thread(target=self._ask, args=(found,), daemon=True)
        self._thread.start()
        self._thread.join(WAIT)
        is_late = self._thread.is_alive()
        if is_late and is_open:  # opening the library takes long on any machine
            self._troubles.append(f"its driver did not answer in {WAIT:g} s")
        self._warn()
        return {} if is_late else found

    def _warn(self) -> None:
        if self._troubles and not self._warned:
            self._warned = True
            warnings.warn(
                f"{self._device}: the run's record lacks what the sensors tell, {self._troubles[0]};"
                " training goes on\nnvidia-smi, or amd-smi, says whether the driver answers",
                stacklevel=3,
            )

    def _ask(self, found: dict[str, Any]) -> None:
        try:
            if self._sensors is None:
                self._sensors = _amd(self._device) if torch.version.hip else _nvidia(self._device)
        except Exception as error:  # of a driver, in a thread
            self._sensors = {}
            self._troubles.append(f"{type(error).__name__}: {error}")
        for name, sensor in self._sensors.items():
            try:
                value = sensor()
            except Exception as error:  # of a driver, in a thread
                if not _is_lacking(error):
                    self._troubles.append(f"{name}: {type(error).__name__}: {error}")
            else:
                if value is not None:
                    found[name] = value


def library() -> str:
    """Return the library of NVIDIA's sensors for `accel env`."""
    try:
        return f"nvidia-ml-py {metadata.version('nvidia-ml-py')}"
    except metadata.PackageNotFoundError:
        return "not read: pip install nvidia-ml-py"


def _nvidia(device: torch.device) -> Sensors:
    """Return the sensors that NVML reads.

    Not by torch.cuda.temperature and its like, which have neither throttling nor ECC, and open NVML anew in
    each call. The address leads to the GPU whatever CUDA_VISIBLE_DEVICES says, and from a MIG slice to the
    whole GPU.
    """
    if find_spec("pynvml") is None:
        return {}
    import pynvml as nvml

    try:
        nvml.nvmlInit()
    except nvml.NVMLError_LibraryNotFound:  # of no driver: the GPU is simulated, or a container hides it
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
        # amdsmi's watts, whatever torch's documentation says. torch has 0 where amdsmi has N/A.
        "power": lambda: cuda.power_draw(device) or None,
        "clock": lambda: cuda.clock_rate(device) or None,
        "busy": lambda: cuda.utilization(device) / 100,
    }


def _is_lacking(error: Exception) -> bool:
    """Return whether an error says that this GPU, or its driver, has no such sensor."""
    of_amd = getattr(error, "err_code", None) in (2, 3)  # AMDSMI_STATUS_NOT_SUPPORTED, NOT_YET_IMPLEMENTED
    return of_amd or type(error).__name__ in ("NVMLError_NotSupported", "NVMLError_FunctionNotFound")

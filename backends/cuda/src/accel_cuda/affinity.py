"""Pin a process to the CPUs nearest its GPU, which the kernel lists in its PCI tree."""

from __future__ import annotations

import logging
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

__all__ = ["override_numa_affinity", "set_numa_affinity"]

PCI_DEVICES = Path("/sys/bus/pci/devices")
logger = logging.getLogger(__name__)


def override_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Pin this process to the CPUs of the NUMA node of GPU `local_process_index`.

    CPUs that the process may not use (taskset, a container's limit) are left out. If the kernel does not know
    the GPU's node, nothing changes.

    Args:
        local_process_index: the GPU's index among the visible ones.
        verbose: log the CPUs; None: if ACCELERATE_DEBUG_MODE or ACCEL_DEBUG is set.
    """
    if not hasattr(os, "sched_setaffinity"):
        logger.warning("CPU affinity is left as it is: this operating system has none")
        return
    allowed = os.sched_getaffinity(0)
    near = cpus_near(torch.cuda.get_device_properties(local_process_index)) & allowed
    if not near:
        logger.warning("CPU affinity is left as it is: no usable CPU is known to be near this GPU")
        return
    os.sched_setaffinity(0, near)
    if verbose or (verbose is None and _debugging()):
        logger.info("local rank %d is pinned to %d CPUs: %s", local_process_index, len(near), sorted(near))


@lru_cache
def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Call `override_numa_affinity` once per process.

    Later calls with the same arguments do nothing.
    """
    override_numa_affinity(local_process_index, verbose)


def cpus_near(properties: Any) -> set[int]:
    """Return the CPUs of the NUMA node of a GPU with these properties; empty if it is unknown."""
    file = PCI_DEVICES / pci_address(properties) / "local_cpulist"
    return parse_cpu_list(file.read_text()) if file.exists() else set()


def pci_address(properties: Any) -> str:
    """Return a GPU's address as the kernel and NVML write it: 0000:1b:00.0."""
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def parse_cpu_list(text: str) -> set[int]:
    """Return the CPUs that the kernel writes as `0-3,8,10-11`."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def _debugging() -> bool:
    return any(
        os.environ.get(name, "0") not in ("", "0") for name in ("ACCELERATE_DEBUG_MODE", "ACCEL_DEBUG")
    )

"""The run behind Accelerate's process-wide state and functions."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4
from weakref import WeakValueDictionary

from accel_compat.environment.variables import load_affinity, parse_flag_from_env
from accel_compat.notices import warn_once
from accel_compat.run import AccelerateRun
from accel_core import AccelError, InitProcessGroupKwargs, plugin_status

if TYPE_CHECKING:
    from torch import device


_runs: list[AccelerateRun] = []
AFFINITY: Final = "ACCELERATE_CPU_AFFINITY"
_hosts: list[AccelerateRun] = []
"""Run of states that are made before an Accelerator is.

It keeps the process group alive.
"""
_pickled: WeakValueDictionary[str, Any] = WeakValueDictionary()


def register(run: AccelerateRun) -> None:
    """Make an Accelerator's run the newest."""
    _place(run)
    _runs[:] = [*(known for known in _runs if not known.ended), run]
    while _hosts:
        _hosts.pop().end()


def unregister(run: AccelerateRun) -> None:
    """Forget a run whose Accelerator is gone, unless there is no other."""
    if any(not known.ended for known in _runs if known is not run):
        _runs[:] = [known for known in _runs if known is not run]


def forget_all() -> None:
    """Forget all runs, of which none ends: they are another process's."""
    _runs.clear()
    _hosts.clear()


def training() -> AccelerateRun | None:
    """Return the run that trains, or None.

    It is the newest that has prepared something, else the newest.
    """
    at_work = (run for run in reversed(_runs) if not run.ended and (run.units or run.prepared.loaders))
    return next(at_work, None) or newest()


def newest() -> AccelerateRun | None:
    """Find the newest Accelerator's live run, else the states' own run."""
    return next((run for run in reversed([*_hosts, *_runs]) if not run.ended), None)


def current() -> AccelerateRun:
    """Return the newest run.

    Raises:
        AccelError: there is neither an Accelerator nor a state.
    """
    run = newest()
    if run is None:
        raise AccelError(
            "there is neither an Accelerator nor a PartialState yet\n"
            "make one first: accelerator = Accelerator()"
        )
    return run


def find_or_make(cpu: bool, **group: Any) -> AccelerateRun:
    """Return the newest run, or make one of device and world only.

    Collective if it makes one.
    """
    run = newest()
    if run is None:
        options = {name: value for name, value in group.items() if value is not None}
        asked = "cpu" if cpu else os.environ.get("ACCELERATE_TORCH_DEVICE")
        run = AccelerateRun(
            python={} if asked is None else {"device": kind_of(asked)},
            objects=[InitProcessGroupKwargs(**options)] if options else [],
            presets=affinity_preset(),
        )
        _place(run)
        _hosts.append(run)
    return run


def affinity_preset() -> dict[str, tuple[Any, str]]:
    """Read the variable that binds each process to the CPUs near its GPU.

    Raises:
        PluginError: it does, there is a GPU, and accel-cuda is not installed.
    """
    if not parse_flag_from_env(AFFINITY):
        return {}
    if plugin_status("cuda") == "missing":
        load_affinity()
        return {}
    return {"cuda.numa_affinity": (True, f"variable {AFFINITY}")}


def _place(run: AccelerateRun) -> None:
    """Put a lone process on the device that ACCELERATE_TORCH_DEVICE numbers."""
    asked = os.environ.get("ACCELERATE_TORCH_DEVICE", "")
    kind, _, number = asked.partition(":")
    if not number or run.device.type != kind:
        return
    if run.world.size > 1:
        warn_once(f"ACCELERATE_TORCH_DEVICE={asked}: the number is ignored, as each process has its own")
        return
    import torch

    run.use_device(torch.device(kind, int(number)))
    if kind != "cpu":
        torch.accelerator.set_device_index(int(number))


def kind_of(asked: str | device) -> str:
    """Return the device without its number: the run gives each rank its own."""
    return str(asked).partition(":")[0]


def pickle_by_reference(thing: object) -> tuple[Any, ...]:
    """Pickle an object by name: in this process it comes back as itself."""
    name = next((known for known, each in _pickled.items() if each is thing), uuid4().hex)
    _pickled[name] = thing
    return _itself, (name,)


def _itself(name: str) -> Any:
    if name not in _pickled:
        raise AccelError(
            "an Accelerator, or its dataloader, was unpickled in another process than its own\n"
            "make an Accelerator there, or send accelerator.process_index or the dataset instead"
        )
    return _pickled[name]

"""Tools for plugin authors' tests: processes, simulated device, conformance kit.

Importing this package imports neither torch nor a test runner.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_testing.conformance import Conformance, conform
    from accel_testing.processes import ProcessError, run_processes
    from accel_testing.recorder import Recorder, hold_to_signatures
    from accel_testing.traffic import Traffic

__all__ = [
    "Conformance",
    "ProcessError",
    "Recorder",
    "Traffic",
    "conform",
    "hold_to_signatures",
    "run_processes",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    from importlib import import_module

    homes = {
        "Conformance": "conformance",
        "Recorder": "recorder",
        "Traffic": "traffic",
        "conform": "conformance",
        "hold_to_signatures": "recorder",
    }
    home = homes.get(name, "processes")
    return getattr(import_module(f"accel_testing.{home}"), name)

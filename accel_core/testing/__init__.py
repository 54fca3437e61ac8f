"""What plugin authors test with: process harness, simulated device, conformance kit.

Importing this package imports neither torch nor a test runner.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_core.testing.processes import ProcessError, run_processes

__all__ = ["ProcessError", "run_processes"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    from accel_core.testing import processes

    return getattr(processes, name)

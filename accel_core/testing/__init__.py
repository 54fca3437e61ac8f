"""What plugin authors test with: process harness, simulated device, conformance kit.

Importing this package imports neither torch nor a test runner.
"""

from __future__ import annotations

from accel_core.testing.processes import ProcessError, run_processes

__all__ = ["ProcessError", "run_processes"]

"""Launching a function in several processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import accel_core


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str = "29500",
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Any = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
) -> None:
    """Run `function(*args)` in new processes of this machine, and wait for them."""
    if num_nodes > 1:
        raise accel_core.LaunchError(
            f"notebook_launcher(num_nodes={num_nodes}): a notebook starts processes on its own machine only\n"
            "write the function into a script and start it by accel launch --nodes"
        )
    if mixed_precision.lower() not in ("no", "fp16", "bf16", "fp8"):
        raise ValueError(
            f"Unknown mixed_precision mode: {mixed_precision.lower()}. Choose between 'no', 'fp16',"
            " 'bf16', 'fp8'."
        )
    accel_core.notebook_launcher(
        function,
        args,
        num_processes,
        None if mixed_precision == "no" else mixed_precision,
        None if use_port == "29500" else use_port,
        max_restarts,
    )


def debug_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2) -> None:
    """Run `function(*args)` in that many new processes on the CPU and wait for them."""
    accel_core.notebook_launcher(function, args, num_processes, device="cpu")

"""Launching a function in several processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import accel_core
from accel_compat import runs
from accel_compat.configs.enums import PrecisionType
from accel_compat.environment.variables import patch_environment
from accel_compat.notices import warn_once
from accel_compat.state.gradient_state import GradientState
from accel_compat.state.states import AcceleratorState


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
    """Run `function(*args)` in new processes of this machine, and wait for them.

    One process is this one: what the function changes stays changed, and what it raises is raised. The
    arguments of a rendezvous mean nothing: the launcher of accel-core starts the processes.
    """
    if node_rank >= num_nodes:
        raise ValueError("The node_rank must be less than the number of nodes.")
    if num_nodes > 1:
        raise accel_core.LaunchError(
            f"notebook_launcher(num_nodes={num_nodes}): a notebook starts processes on its own machine only\n"
            "write the function into a script and start it by accel launch --nodes"
        )
    precision = mixed_precision.lower()
    if precision not in PrecisionType.list():
        raise ValueError(
            f"Unknown mixed_precision mode: {precision}. Choose between 'no', 'fp16', 'bf16', 'fp8'."
        )
    num_processes = _processes_here(num_processes)
    if num_processes == 1:
        with patch_environment(**({} if precision == "no" else {"accelerate_mixed_precision": precision})):
            function(*args)
        return
    accel_core.notebook_launcher(
        partial(_call_afresh, function),
        args,
        num_processes,
        None if precision == "no" else precision,
        None if use_port == "29500" else use_port,
        max_restarts or None,
    )


def _processes_here(asked: int | None) -> int | None:
    """Return the number of processes that train in this notebook.

    None stands for one per TPU core.

    Raises:
        ValueError: none is asked for, and this is no notebook of Colab's, nor of Kaggle's with TPUs.
    """
    kaggle = any(name.startswith("KAGGLE") for name in os.environ)
    colab = not kaggle and _is_colab()
    if (kaggle or colab) and ("TPU_NAME" in os.environ or os.environ.get("PJRT_DEVICE") == "TPU"):
        return None
    if colab and torch.accelerator.device_count() < 2:
        if (asked or 1) > 1:
            warn_once(f"notebook_launcher: Colab has one device, so one process trains, not {asked}")
        return 1
    if asked is None:
        raise ValueError(
            "You have to specify the number of devices you would like to use.\n"
            "add `num_processes=...` to your call"
        )
    return asked


def _is_colab() -> bool:
    """Tell whether this process is the kernel of a Colab notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return shell is not None and "google.colab" in str(shell())


def debug_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2) -> None:
    """Run `function(*args)` in that many new processes on the CPU and wait for them."""
    accel_core.notebook_launcher(partial(_call_afresh, function), args, num_processes, device="cpu")


def _call_afresh(function: Callable[..., Any], *args: Any) -> None:
    """Call the function without the runs and states that a fork has of its parent.

    Its result is dropped, as it may not pickle.
    """
    runs.forget_all()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    function(*args)

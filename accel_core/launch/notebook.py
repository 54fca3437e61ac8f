"""Launch a function on several processes, from a notebook or a script."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from accel_core.errors import LaunchError


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str | None = None,
    use_port: str | int | None = None,
    max_restarts: int | None = None,
    *,
    device: str | None = None,
    strategy: str | None = None,
    config: str | None = None,
) -> Sequence[Any]:
    """Run `function(*args)` in new processes of this machine, and wait for them.

    Create the Accelerator, the model and every tensor inside `function`. On Linux the processes are
    forked, so `function` may be defined in a notebook cell; elsewhere it must come from a module.

    Args:
        function: called in each worker.
        args: positional arguments of `function`.
        num_processes: number of workers; None: the value of `accel.yaml`, else one per visible device.
        mixed_precision: "no", "fp16", "bf16" or a precision plugin; None: the value of `accel.yaml`.
        use_port: port of 127.0.0.1 at which the workers meet; None: a free port.
        max_restarts: maximum number of restarts after a failure; None: the value of `accel.yaml`.
        device: device plugin, torch device type, or "auto"; None: the value of `accel.yaml`.
        strategy: strategy plugin or "auto"; None: the value of `accel.yaml`.
        config: the YAML file to read instead of `accel.yaml`.

    Returns:
        The value that each rank's call returned, in rank order. Values must be picklable.

    Raises:
        ConfigError: the settings are wrong.
        LaunchError: this process has used the accelerator, or has a process group, which its forks then
            cannot use; or a worker failed: the message has the traceback of the first failing rank.
    """
    from accel_core.launch.launcher import launch_function
    from accel_core.launch.plan import plan

    given = {
        "launch.processes_per_node": num_processes,
        "launch.rendezvous": None if use_port is None else f"127.0.0.1:{use_port}",
        "launch.max_restarts": max_restarts,
        "mixed_precision": mixed_precision,
        "device": device,
        "strategy": strategy,
    }
    python = {path: value for path, value in given.items() if value is not None}
    launch = plan(python=python, file=config)
    if sys.platform == "linux":
        _refuse_process_group()
        if device != "cpu":
            _refuse_used_device()
    return launch_function(function, tuple(args), launch.job((), launch.processes()))


def _refuse_process_group() -> None:
    # A fork has none of the group's threads: a collective would wait forever, and freeing the group crashes.
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed and distributed.is_available() and distributed.is_initialized():
        raise LaunchError(
            "notebook_launcher forks its workers, but this process has a process group, which forks cannot"
            " use\n"
            "end it first: accelerator.end_training(), or torch.distributed.destroy_process_group()"
        )


def _refuse_used_device() -> None:
    torch: Any = sys.modules.get("torch")  # a process that used a device has imported it
    device = torch and torch.accelerator.current_accelerator()
    if device and torch.get_device_module(device.type).is_initialized():
        raise LaunchError(
            f"notebook_launcher forks its workers, but this process has already used {device.type}, which"
            " a fork then cannot\n"
            "restart the kernel, and touch the device only inside the function; or pass device='cpu'"
        )

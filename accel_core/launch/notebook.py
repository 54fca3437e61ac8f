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

    Make the Accelerator, the model and every tensor inside `function`. On Linux the processes are
    forked, so a function of a notebook cell will do; elsewhere it must come from a module.

    Args:
        function: called in each worker.
        args: its arguments.
        num_processes: how many workers; None: what `accel.yaml` says, else one a visible device.
        mixed_precision: "no", "fp16", "bf16" or a precision plugin; None: what `accel.yaml` says.
        use_port: port of 127.0.0.1 where the workers meet; None: a free one.
        max_restarts: how often failed workers are started again; None: what `accel.yaml` says.
        device: device plugin, torch device type, or "auto".
        strategy: strategy plugin or "auto".
        config: the YAML file to read instead of `accel.yaml`.

    Returns:
        What each rank's call returned, in rank order. It must pickle.

    Raises:
        ConfigError: the settings are wrong.
        LaunchError: this process has used the accelerator, or has a process group, which its forks then
            cannot use; or a worker failed: the message holds the first failing rank's traceback.
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
    # A collective of it waits forever in a fork, which has none of its threads, and freeing it crashes there.
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

"""What tests of collectives share: a body that real ranks run."""

from __future__ import annotations

from accel_core import Accelerator, InitProcessGroupKwargs


def ranks(run_processes, body, *args, world=2, timeout=None, **options):
    """What `body(accelerator, *args)` returns on each rank. `timeout`: of collectives, in seconds."""
    if timeout:
        options["kwargs_handlers"] = [InitProcessGroupKwargs(timeout=timeout)]
    return run_processes(_in_a_run, body, args, options, world=world)


def _in_a_run(body, args, options):
    accelerator = Accelerator(cpu=True, **options)
    try:
        return body(accelerator, *args)
    finally:
        accelerator.end_training()

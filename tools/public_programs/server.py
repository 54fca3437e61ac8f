"""Run programs one after another, each in forked processes that write down its numbers.

`python server.py JOBS.json` imports the large libraries once. For each job it forks `processes` ranks, and
writes `record-RANK.txt` into the job's folder: each loss, each optimizer step's learning rate and digest of
its parameters, each metric. The exit statuses of the ranks go to `status.json`.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import random
import runpy
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final

LIBRARIES: Final = (
    "torch",
    "torchvision",
    "transformers",
    "transformers.trainer",
    "datasets",
    "accelerate",
    "peft",
    "trl",
    "sentence_transformers",
    "diffusers",
    "timm",
    "tensorboard",
    "torch.utils.tensorboard",
)


def main(jobs: Path) -> None:
    operators = import_module("torchvision_operators")
    operators.declare()
    for library in LIBRARIES:
        with suppress(ImportError):
            import_module(library)
    list(import_module("transformers").MODEL_MAPPING.keys())  # imports all configurations, as many scripts do
    for job in json.loads(jobs.read_text()):
        run(job)


def run(job: dict[str, Any]) -> None:
    """Fork the job's ranks and wait for them, at most `seconds`."""
    folder = Path(job["folder"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [fork(partial(program, job, rank, port)) for rank in range(job["processes"])]
    begun, ends = time.monotonic(), {}
    while len(ends) < len(ranks):
        for pid in ranks:
            ended, status = (0, 0) if pid in ends else os.waitpid(pid, os.WNOHANG)
            if ended:
                ends[pid] = os.waitstatus_to_exitcode(status)
        limit = 5 if any(ends.values()) else job["seconds"]
        if time.monotonic() - begun > limit:
            for pid in set(ranks) - set(ends):
                os.killpg(pid, signal.SIGKILL)
        time.sleep(0.02)
    seconds = round(time.monotonic() - begun, 1)
    folder.joinpath("status.json").write_text(
        json.dumps({"statuses": [ends[pid] for pid in ranks], "seconds": seconds})
    )


def fork(body: Any) -> int:
    """Run `body` in a process group of its own; its id."""
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    os.setpgid(0, 0)
    status = 1
    try:
        status = body()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def program(job: dict[str, Any], rank: int, port: int) -> int:
    """Run the script as `__main__` in this process; its exit status."""
    folder = Path(job["folder"])
    os.chdir(folder)
    log = folder.joinpath(f"log-{rank}.txt").open("w", buffering=1)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = log
    os.environ |= {"PROGRAM_RECORD": str(folder / f"record-{rank}.txt"), **job["variables"]}
    if job["processes"] > 1:
        world = {"WORLD_SIZE": job["processes"], "LOCAL_WORLD_SIZE": job["processes"], "MASTER_PORT": port}
        own = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "MASTER_ADDR": "127.0.0.1"}
        os.environ |= {name: str(value) for name, value in (world | own).items()}
    record(Path(os.environ["PROGRAM_RECORD"]))
    seed()
    faulthandler.dump_traceback_later(job["seconds"] - 5, file=log)  # of what waits for ever
    sys.path.insert(0, job["beside"])
    sys.argv = [job["script"], *job["arguments"]]
    status = 0
    try:
        runpy.run_path(job["script"], run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # whatever a program raises is its result
        traceback.print_exc()
        status = 1
    import torch

    with suppress(Exception):
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return status


def seed() -> None:
    """Seed what a program may leave unseeded."""
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  # the generator that programs use
    torch.manual_seed(0)


def record(file: Path) -> None:
    """Write each loss that is differentiated, and each step of an optimizer of torch."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    lines = file.open("a", buffering=1)
    backward = torch.autograd.backward
    optimizers: list[Any] = []

    def recorded(tensors: Any, *arguments: Any, **options: Any) -> None:
        if isinstance(tensors, torch.Tensor) and tensors.numel() == 1:
            lines.write(f"loss {tensors.item()!r}\n")
        backward(tensors, *arguments, **options)

    def stepped(optimizer: Any, *_: Any) -> None:
        if type(optimizer).__module__.startswith(("accel_", "accelerate")):
            return
        if not any(optimizer is seen for seen in optimizers):
            optimizers.append(optimizer)
        number = next(n for n, seen in enumerate(optimizers) if seen is optimizer)
        groups = optimizer.param_groups
        rates = [float(group["lr"]) for group in groups]
        digest = digest_of([p for group in groups for p in group["params"]])
        lines.write(f"step {number} lr {rates!r} weights {digest}\n")

    torch.autograd.backward = recorded
    register_optimizer_step_post_hook(stepped)


def digest_of(tensors: list[Any]) -> str:
    import torch

    digest = hashlib.sha256()
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor).detach().cpu().contiguous()
        digest.update(local.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    main(Path(sys.argv[1]))

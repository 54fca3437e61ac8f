"""Command lines and variables of workers, for programs that start workers."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from argparse import Namespace
from collections.abc import Sequence
from shutil import which
from typing import Any

from accel_compat.configs.enums import DynamoBackend, PrecisionType
from accel_compat.launch.workers import environment
from accel_compat.modeling.wrappers import get_free_port, is_port_in_use


def prepare_simple_launcher_cmd_env(args: Namespace) -> tuple[list[str], dict[str, str]]:
    """Return one process's command (mpirun's with a hostfile) and environment."""
    if args.no_python and args.module:
        raise ValueError("--module and --no_python cannot be used together")
    command = [] if args.mpirun_hostfile is None else _mpirun(args)
    if not args.no_python:
        command += [sys.executable, *(["-m"] if args.module else [])]
    found = _environment(args)
    several = (args.num_processes or 1) > 1 or args.num_machines > 1
    if args.num_machines > 1 and None in (args.main_process_ip, args.main_process_port):
        raise ValueError("When using multiple machines, you need to specify the main process IP and port.")
    if several:
        found["MASTER_ADDR"] = args.main_process_ip or "127.0.0.1"
        found["MASTER_PORT"] = str(args.main_process_port or 29500)
    return [*command, args.training_script, *args.training_script_args], found


def _mpirun(args: Namespace) -> list[str]:
    """Return mpirun's command for all processes of the hostfile, by the MPI's flags."""
    program = next((each for each in ("mpirun", "mpiexec") if which(each)), None)
    if program is None:
        raise OSError(
            "mpirun or mpiexec were not found. Ensure that Intel MPI, Open MPI, or MVAPICH are installed."
        )
    opened = b"Open MPI" in subprocess.check_output([program, "--version"])  # noqa: S603  found on the path
    hosts, on_each = ("--hostfile", "--npernode") if opened else ("-f", "-ppn")
    count, nodes = args.num_processes, args.num_machines
    words = [program, hosts, args.mpirun_hostfile, on_each, str(count // nodes if count and nodes else 1)]
    words += ["-n", str(count)] if count else []
    return [*words, *(["--bind-to", "socket"] if opened else [])]


def prepare_multi_gpu_env(args: Namespace) -> dict[str, str]:
    """Return the environment of torchrun's workers; `args` get its own arguments.

    Raises:
        ConnectionError: the port is in use, on the first of several machines.
    """
    chosen = args.main_process_port != 0
    port = args.main_process_port or 29500 if chosen else get_free_port()
    args.main_process_port = port
    args.nproc_per_node = str(args.num_processes // max(args.num_machines, 1))
    if args.num_machines > 1:
        args.nnodes, args.node_rank = str(args.num_machines), int(args.machine_rank)
    if args.num_machines <= 1:
        args.master_port = str(port)
    elif getattr(args, "same_network", False):
        args.master_addr, args.master_port = str(args.main_process_ip), str(port)
    else:
        args.rdzv_endpoint = f"{args.main_process_ip}:{port}"
    listens = args.num_machines <= 1 or int(args.machine_rank) == 0
    if chosen and listens and is_port_in_use(port):
        if args.num_machines > 1:
            raise ConnectionError(
                f"Tried to launch distributed communication on port `{port}`, but another process is"
                " utilizing it. Please specify a different port, by `--main_process_port`."
            )
        args.standalone = True
        warnings.warn(f"Port `{port}` is already in use; an open one is taken instead.", stacklevel=2)
    if args.module and args.no_python:
        raise ValueError("--module and --no_python cannot be used together")
    return _environment(args)


def _environment(args: Namespace) -> dict[str, str]:
    """Return this process's environment with the arguments for workers' plugins."""
    asked: Any
    for what, kinds, asked in (
        ("mixed_precision mode", PrecisionType, args.mixed_precision.lower()),
        ("dynamo backend", DynamoBackend, args.dynamo_backend.upper()),
    ):
        if asked not in kinds.list():
            raise ValueError(f"Unknown {what}: {asked}. Choose between {kinds.list()}.")
    said = {name: value for name, value in vars(args).items() if value is not None}
    # A program may make its arguments by hand, and leave some out.
    return {**os.environ, **environment({**said, "cpu": bool(said.get("cpu") or said.get("use_cpu"))})}


def _convert_nargs_to_dict(nargs: Sequence[str]) -> dict[str, Any]:
    """`--name value` pairs, with numbers and truths for what spells them."""
    found: dict[str, Any] = {}
    for name, value in zip(nargs[::2], [*nargs[1::2], "--"], strict=False):
        if not name.startswith("-") or value.startswith("-"):
            raise ValueError(
                "SageMaker doesn't support argparse actions for `store_true` or `store_false`. Please define"
                " explicit types"
            )
        found[name.lstrip("-").replace("-", "_")] = _typed(value)
    return found


def _typed(value: str) -> Any:
    if value in ("True", "False"):
        return value == "True"
    try:
        number = float(value)
    except ValueError:
        return value
    return int(number) if number.is_integer() else number

"""`accelerate launch`, for programs that call it."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace
from copy import copy
from pathlib import Path
from typing import Any

import torch

from accel_compat.configs.enums import ComputeEnvironment
from accel_compat.launch import config_file
from accel_compat.launch.parser import given_flags, launch_parser
from accel_compat.launch.request import DISTRIBUTED_TYPES, read_arguments, refuse_contradictions
from accel_compat.launch.workers import launch
from accel_compat.settings import SECTIONS

_APART = ("compute_environment", "mixed_precision", "distributed_type")


def launch_command_parser(subparsers: Any = None) -> ArgumentParser:
    """Return a parser of the command line; of `launch` where subparsers are given."""
    made = launch_parser()
    if subparsers is not None:
        made = subparsers.add_parser("launch", parents=[made], add_help=False)
        made.set_defaults(func=launch_command)
    return made


def launch_command(args: Namespace) -> None:
    """Start what was parsed, wait for it, and exit as it did if it failed."""
    known = Namespace(**{name: value for name, value in vars(args).items() if name != "func"})
    _validate_launch_command(copy(args))  # the file is checked as Accelerate does
    code = launch(read_arguments(known, Path(config_file.default_config_file)))
    if code:
        sys.exit(code)


def _require_devices(args: Namespace, defaults: Any) -> None:
    ids = str(args.gpu_ids or defaults.gpu_ids or "all")
    machines = args.num_machines or defaults.num_machines
    if args.multi_gpu and ids != "all" and "," not in ids and machines <= 1:
        raise ValueError(
            "Less than two GPU ids were configured and tried to run on multiple GPUs. "
            "Please ensure at least two are specified for `--gpu_ids`, or use `--gpu_ids='all'`."
        )


def _validate_launch_command(args: Namespace) -> tuple[Namespace, Any, bool]:
    """Fill arguments from the config file.

    Returns (the arguments, the file's config or None, True if the precision is the file's).
    """
    refuse_contradictions(args)
    defaults: Any = None
    if args.config_file is not None or (os.path.isfile(config_file.default_config_file) and not args.cpu):
        defaults = config_file.load_config_from_file(args.config_file)
        if not any(given_flags(args).get(name) for name in (*DISTRIBUTED_TYPES.values(), "multi_gpu")):
            _choose(args, defaults)
        _require_devices(args, defaults)
        if defaults.compute_environment == ComputeEnvironment.LOCAL_MACHINE:
            _fill(args, defaults)
        if args.num_processes == -1:
            raise ValueError("You need to manually pass in `--num_processes` using this config yaml.")
    elif args.num_processes is None:
        args.num_processes = torch.accelerator.device_count()
    args.debug = bool(args.debug or getattr(defaults, "debug", False))
    from_file = not args.mixed_precision and getattr(defaults, "mixed_precision", None) is not None
    args.mixed_precision = args.mixed_precision or getattr(defaults, "mixed_precision", None) or "no"
    plain = {"num_machines": 1, "dynamo_backend": "no", "gpu_ids": "all", "use_cpu": args.cpu}
    plain["num_cpu_threads_per_process"] = int(os.environ.get("OMP_NUM_THREADS", "1"))
    for name, value in plain.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    return args, defaults, from_file


def _choose(args: Namespace, defaults: Any) -> None:
    """Choose the strategy that the file's distributed_type means."""
    kind = defaults.distributed_type.value
    if kind in DISTRIBUTED_TYPES:
        setattr(args, DISTRIBUTED_TYPES[kind], True)
    args.multi_gpu = kind.startswith("MULTI_") and kind != "MULTI_CPU"
    args.use_parallelism_config = bool(getattr(defaults, "parallelism_config", None))


def _fill(args: Namespace, defaults: Any) -> None:
    """Fill arguments that were not given from the file."""
    said = given_flags(args)
    for section, value in vars(defaults).items():
        if isinstance(value, dict):
            start = SECTIONS.get(section, "")
            for key, inner in value.items():
                name = key if key.startswith(start) else start + key
                if name not in said:
                    setattr(args, name, inner)
        elif section not in _APART and getattr(args, section, None) is None:
            setattr(args, section, value)

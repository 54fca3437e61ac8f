"""`accelerate env`, `test`, `to-fsdp2` and `tpu-config`.

The script and programs call them.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import yaml

from accel_compat.launch import config_file
from accel_compat.launch.request import parse
from accel_compat.launch.workers import accel, launch

_RELEASES = {"dev": "git+https://github.com/huggingface/accelerate.git", "latest": "accelerate -U"}


def subcommand_parser(
    subparsers: Any, name: str, about: str, function: Callable[[Namespace], None]
) -> ArgumentParser:
    """Make a command's parser, as a subcommand where `subparsers` are given."""
    if subparsers is None:
        return ArgumentParser(f"Accelerate {name} command", description=about)
    parser: ArgumentParser = subparsers.add_parser(name, description=about)
    parser.set_defaults(func=function)
    return parser


def env_command_parser(subparsers: Any = None) -> ArgumentParser:
    """Make the parser of `env`."""
    parser = subcommand_parser(subparsers, "env", "Show what accel-core finds on this machine.", env_command)
    parser.add_argument("--config_file", "--config-file", help="Has no effect")
    return parser


def env_command(args: Namespace) -> None:
    """Print what accel-core finds on this machine."""
    subprocess.run([accel(), "env"], check=True)  # noqa: S603  ours


def test_command_parser(subparsers: Any = None) -> ArgumentParser:  # noqa: PT028  Accelerate's name
    """Make the parser of `test`."""
    about = "Test whether the processes that a config asks for work together."
    parser = subcommand_parser(subparsers, "test", about, test_command)
    parser.add_argument("--config_file", "--config-file", help="Default: the one of `accelerate config`")
    return parser


def test_command(args: Namespace) -> None:
    """Start the processes, and exit as they did if they failed."""
    file = [] if args.config_file is None else ["--config_file", args.config_file]
    code = launch(parse([*file, "-m", "accel_compat.launch.checks"], Path(config_file.default_config_file)))
    if code:
        sys.exit(code)
    print("Test is a success! You are ready for your distributed training!")  # noqa: T201  as there


def tpu_command_parser(subparsers: Any = None) -> ArgumentParser:
    """Make the parser of `tpu-config`."""
    about = "Run commands across TPU VMs for initial setup before running `accelerate launch`."
    parser = subcommand_parser(subparsers, "tpu-config", about, tpu_command_launcher)
    for name in ("config_file", "tpu_name", "tpu_zone", "command_file"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--command", action="append", nargs="+", help="May be given several times")
    for name in ("use_alpha", "install_accelerate", "debug"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--accelerate_version", default="latest")
    return parser


def tpu_command_launcher(args: Namespace) -> None:
    """Run commands on every host of a TPU pod by gcloud.

    With `debug` it prints the command only.
    """
    if args.config_file is not None or os.path.isfile(config_file.default_config_file):
        _fill_from_file(args)
    version = args.accelerate_version
    lines = [*(line if isinstance(line, list) else [line] for line in args.command or ())]
    commands = [line for several in lines for line in several]
    if args.command_file:
        commands = Path(args.command_file).read_text(encoding="utf-8").splitlines()
    if not commands:
        raise ValueError("You must specify either a command file or a command to run on the pod.")
    if args.install_accelerate:
        commands.insert(0, f"pip install {_RELEASES.get(version, f'accelerate=={version}')}")
    program = ["gcloud", *(["alpha"] if args.use_alpha else []), "compute", "tpus", "tpu-vm", "ssh"]
    program += [args.tpu_name, "--zone", args.tpu_zone]
    program += ["--command", "; ".join(["cd /usr/share", *commands]), "--worker", "all"]
    if args.debug:
        print(f"Running {' '.join(program)}")  # noqa: T201  as there
        return
    subprocess.run(program, check=True)  # noqa: S603  what the user asked for
    print("Successfully setup pod.")  # noqa: T201  as there


def _fill_from_file(args: Namespace) -> None:
    config: Any = config_file.load_config_from_file(args.config_file)
    if not args.command and not args.command_file:
        args.command_file = config.command_file
    args.command = args.command or config.commands
    args.tpu_name = args.tpu_name or config.tpu_name
    args.tpu_zone = args.tpu_zone or config.tpu_zone


logger = logging.getLogger("accelerate.commands.to_fsdp2")

_OLD: Final = ("fsdp_backward_prefetch", "fsdp_sync_module_states", "fsdp_use_orig_params")
LOST: Final = {**dict.fromkeys(_OLD, "has been removed"), "fsdp_forward_prefetch": "is not yet implemented"}
"""Key without a place in version 2 -> why."""
_RESHARDS: Final = {
    "FULL_SHARD": True,
    "SHARD_GRAD_OP": False,
    "HYBRID_SHARD": True,
    "HYBRID_SHARD_ZERO2": False,
    "NO_SHARD": False,
}
_AS_BEFORE: Final = ("fsdp_sharding_strategy", "fsdp_reshard_after_forward")


def convert_config_to_fsdp2(config: dict[str, Any]) -> dict[str, Any]:
    """Convert `fsdp_config` to version 2; warn of keys that it does not have."""
    before = config.get("fsdp_config") or {}
    if not before:
        logger.info("No FSDP config found in the config file, skipping conversion...")
        return config
    if before.get("fsdp_version", 1) == 2:
        logger.warning("Config already specifies FSDP2, skipping conversion...")
        return config
    after: dict[str, Any] = {}
    for name, value in before.items():
        if name in LOST:
            logger.warning("Argument %s %s in FSDP2, skipping this key...", name, LOST[name])
        elif name in _AS_BEFORE:
            after["fsdp_reshard_after_forward"] = _RESHARDS.get(value, value)
        else:
            after[name] = value
    config["fsdp_config"] = {**after, "fsdp_version": 2}
    return config


def load_config(config_file: str) -> dict[str, Any]:
    """Load a config file."""
    with Path(config_file).open(encoding="utf-8") as opened:  # YAML's errors name an open file
        found: dict[str, Any] | None = yaml.safe_load(opened)
    if not found:
        raise ValueError("Config file is empty")
    return found


def to_fsdp2_command_parser(subparsers: Any = None) -> ArgumentParser:
    """Make the parser of `to-fsdp2`."""
    about = "Convert an Accelerate config from FSDP1 to FSDP2"
    parser = subcommand_parser(subparsers, "to-fsdp2", about, to_fsdp2_command)
    parser.add_argument("--config_file", "--config-file", required=True, help="The file to convert")
    parser.add_argument("--overwrite", action="store_true", help="Write to it, or over the output file")
    parser.add_argument("--output_file", "--output-file", help="Default with --overwrite: the file itself")
    return parser


def to_fsdp2_command(args: Namespace) -> None:
    """Convert a file."""
    if not Path(args.config_file).exists():
        raise FileNotFoundError(f"Config file {args.config_file} not found")
    if not args.overwrite and args.output_file is None:
        raise ValueError("If --overwrite is not set, --output_file must be provided")
    if not args.overwrite and Path(args.output_file).exists():
        raise FileExistsError(f"Output file {args.output_file} already exists and --overwrite is not set")
    converted = convert_config_to_fsdp2(load_config(args.config_file))
    Path(args.output_file or args.config_file).write_text(yaml.dump(converted), encoding="utf-8")

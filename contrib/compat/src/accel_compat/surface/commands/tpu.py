"""`accelerate tpu-config`: run commands on every host of a TPU pod, by Google's own program."""

from __future__ import annotations

import os
import subprocess
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from accel_compat.commands import accelerate

from .config.config_args import default_config_file, load_config_from_file

__all__ = ["main", "tpu_command_launcher", "tpu_command_parser"]

_RELEASES = {"dev": "git+https://github.com/huggingface/accelerate.git", "latest": "accelerate -U"}


def tpu_command_parser(subparsers: Any = None) -> ArgumentParser:
    """Its command line; as a subcommand `tpu-config` where subparsers are given."""
    about = "Run commands across TPU VMs for initial setup before running `accelerate launch`."
    if subparsers is None:
        parser = ArgumentParser("Accelerate tpu-config command", description=about)
    else:
        parser = subparsers.add_parser("tpu-config", description=about)
        parser.set_defaults(func=tpu_command_launcher)
    for name in ("config_file", "tpu_name", "tpu_zone", "command_file"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--command", action="append", nargs="+", help="May be given several times")
    for name in ("use_alpha", "install_accelerate", "debug"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--accelerate_version", default="latest")
    return parser


def tpu_command_launcher(args: Namespace) -> None:
    """Run what was parsed; with `debug` only print it."""
    if args.config_file is not None or os.path.isfile(default_config_file):
        _fill(args)
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


def _fill(args: Namespace) -> None:
    """What was not given, from the config file."""
    found: Any = load_config_from_file(args.config_file)
    if not args.command and not args.command_file:
        args.command_file = found.command_file
    args.command = args.command or found.commands
    args.tpu_name = args.tpu_name or found.tpu_name
    args.tpu_zone = args.tpu_zone or found.tpu_zone


def main() -> None:
    """The command, by this process's command line."""
    accelerate("tpu-config")


if __name__ == "__main__":
    main()

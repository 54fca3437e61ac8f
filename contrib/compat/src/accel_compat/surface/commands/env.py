"""`accelerate env`: what accel-core finds on this machine."""

from __future__ import annotations

import subprocess
from argparse import ArgumentParser, Namespace
from typing import Any

from accel_compat.commands import accelerate
from accel_compat.launching import accel

__all__ = ["env_command", "env_command_parser", "main"]


def env_command_parser(subparsers: Any = None) -> ArgumentParser:
    """Its command line; as a subcommand `env` where subparsers are given."""
    if subparsers is None:
        parser = ArgumentParser("Accelerate env command")
    else:
        parser = subparsers.add_parser("env")
        parser.set_defaults(func=env_command)
    parser.add_argument("--config_file", "--config-file", help="Means nothing here")
    return parser


def env_command(args: Namespace) -> None:
    """Print it."""
    subprocess.run([accel(), "env"], check=True)  # noqa: S603  ours


def main() -> None:
    """The command, by this process's command line."""
    accelerate("env")


if __name__ == "__main__":
    main()

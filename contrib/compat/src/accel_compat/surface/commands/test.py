"""`accelerate test`: whether the processes that a config asks for work together."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from accel_compat.commands import accelerate
from accel_compat.launching import launch
from accel_compat.settings import parse

from .config.config_args import default_config_file

__all__ = ["main", "test_command", "test_command_parser"]


def test_command_parser(subparsers: Any = None) -> ArgumentParser:  # noqa: PT028  Accelerate's name
    """Its command line; as a subcommand `test` where subparsers are given."""
    if subparsers is None:
        parser = ArgumentParser("Accelerate test command")
    else:
        parser = subparsers.add_parser("test")
        parser.set_defaults(func=test_command)
    parser.add_argument("--config_file", "--config-file", help="Default: the one of `accelerate config`")
    return parser


def test_command(args: Namespace) -> None:
    """Start them, and exit as they did if they failed."""
    file = [] if args.config_file is None else ["--config_file", args.config_file]
    code = launch(parse([*file, "-m", "accel_compat.checks"], Path(default_config_file)))
    if code:
        sys.exit(code)
    print("Test is a success! You are ready for your distributed training!")  # noqa: T201  as there


def main() -> None:
    """The command, by this process's command line."""
    accelerate("test")


if __name__ == "__main__":
    main()

"""`accelerate launch`, for programs that call it."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from accel_compat.launching import launch
from accel_compat.settings import asked_by, launch_parser

from .config.config_args import default_config_file

__all__ = ["launch_command", "launch_command_parser"]


def launch_command_parser(subparsers: Any = None) -> ArgumentParser:
    """A parser of the command line; as a subcommand `launch` where subparsers are given."""
    parser = launch_parser()
    if subparsers is not None:
        parser = subparsers.add_parser("launch", parents=[parser], add_help=False)
        parser.set_defaults(func=launch_command)
    return parser


def launch_command(args: Namespace) -> None:
    """Start what was parsed, wait for it, and exit as it did if it failed."""
    known = Namespace(**{name: value for name, value in vars(args).items() if name != "func"})
    code = launch(asked_by(known, Path(default_config_file)))
    if code:
        sys.exit(code)

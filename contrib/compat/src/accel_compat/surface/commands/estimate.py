"""`accelerate estimate-memory`: its command line; that it is not served is said when it is called."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from accel_compat.commands import accelerate
from accel_compat.refusing import unserved

__all__ = ["estimate_command_parser", "main"]


def estimate_command_parser(subparsers: Any = None) -> ArgumentParser:
    """Its command line; as a subcommand `estimate-memory` where subparsers are given."""
    about = "Model size estimator for fitting a model onto CUDA memory."
    if subparsers is None:
        parser = ArgumentParser(description=about)
    else:
        parser = subparsers.add_parser("estimate-memory", description=about)
        parser.set_defaults(func=__getattr__("estimate_command"))
    kinds = ["float32", "float16", "int8", "int4"]
    parser.add_argument("model_name")
    parser.add_argument("--library_name", choices=["timm", "transformers"])
    parser.add_argument("--dtypes", nargs="+", default=kinds, choices=kinds)
    parser.add_argument("--trust_remote_code", action="store_true")
    return parser


def main() -> None:
    """The command, by this process's command line."""
    accelerate("estimate-memory")


__getattr__ = unserved(__name__)


if __name__ == "__main__":
    main()

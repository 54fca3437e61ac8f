"""Where Accelerate keeps its default config file, and what is in it."""

from __future__ import annotations

from accel_compat.commands import accelerate
from accel_compat.refusing import unserved

from .config_args import default_config_file, load_config_from_file

__all__ = ["default_config_file", "load_config_from_file", "main"]


def main() -> None:
    """The command, by this process's command line."""
    accelerate("config")


__getattr__ = unserved(__name__)


if __name__ == "__main__":
    main()

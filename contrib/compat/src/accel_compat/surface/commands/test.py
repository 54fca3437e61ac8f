"""`accelerate test`."""

from functools import partial

from accel_compat.launch.commands import accelerate
from accel_compat.launch.subcommands import test_command, test_command_parser

main = partial(accelerate, "test")


if __name__ == "__main__":
    main()

"""`accelerate env`."""

from functools import partial

from accel_compat.launch.commands import accelerate
from accel_compat.launch.subcommands import env_command, env_command_parser

main = partial(accelerate, "env")


if __name__ == "__main__":
    main()

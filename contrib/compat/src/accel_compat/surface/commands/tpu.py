"""`accelerate tpu-config`."""

from functools import partial

from accel_compat.launch.commands import accelerate
from accel_compat.launch.subcommands import tpu_command_launcher, tpu_command_parser

main = partial(accelerate, "tpu-config")


if __name__ == "__main__":
    main()

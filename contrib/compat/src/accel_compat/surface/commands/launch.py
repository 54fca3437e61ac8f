"""`accelerate launch`."""

from functools import partial

from accel_compat.launch.commands import accelerate
from accel_compat.launch.launch_command import _validate_launch_command, launch_command, launch_command_parser

main = partial(accelerate, "launch")


if __name__ == "__main__":
    main()

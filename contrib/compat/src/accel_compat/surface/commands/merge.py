"""`accelerate merge-weights`."""

from functools import partial

from accel_compat.launch.commands import accelerate
from accel_compat.launch.weight_merging import merge_command, merge_command_parser

main = partial(accelerate, "merge-weights")


if __name__ == "__main__":
    main()

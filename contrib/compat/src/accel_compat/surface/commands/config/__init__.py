"""`accelerate config`, and where its file is."""

from functools import partial

from accel_compat.launch.commands import accelerate
from accel_compat.launch.config_file import default_config_file, load_config_from_file
from accel_compat.launch.config_questions import config_command, config_command_parser, get_user_input

main = partial(accelerate, "config")


if __name__ == "__main__":
    main()

"""Writing a config file by questions."""

from accel_compat.launch.config_questions import config_command, config_command_parser, get_user_input

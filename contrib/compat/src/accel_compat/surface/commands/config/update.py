"""Writing a config file again."""

from accel_compat.launch.config_questions import update_command_parser, update_config, update_config_command

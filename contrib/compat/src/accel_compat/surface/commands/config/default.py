"""Writing the default config file."""

from accel_compat.launch.config_file import default_json_config_file, write_basic_config

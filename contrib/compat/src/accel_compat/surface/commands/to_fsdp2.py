"""`accelerate to-fsdp2`."""

from accel_compat.launch.subcommands import (
    convert_config_to_fsdp2,
    load_config,
    to_fsdp2_command,
    to_fsdp2_command_parser,
)

"""`accelerate to-fsdp2`: a config file for FSDP version 1, as one for version 2."""

from __future__ import annotations

import logging
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any, Final

import yaml

__all__ = ["convert_config_to_fsdp2", "load_config", "to_fsdp2_command", "to_fsdp2_command_parser"]

logger = logging.getLogger(__name__)

_REMOVED: Final = ("fsdp_backward_prefetch", "fsdp_sync_module_states", "fsdp_use_orig_params")
_NOT_YET: Final = ("fsdp_forward_prefetch",)
_RESHARDS: Final = {
    "FULL_SHARD": True,
    "SHARD_GRAD_OP": False,
    "HYBRID_SHARD": True,
    "HYBRID_SHARD_ZERO2": False,
    "NO_SHARD": False,
}
_AS_BEFORE: Final = ("fsdp_sharding_strategy", "fsdp_reshard_after_forward")


def convert_config_to_fsdp2(config: dict[str, Any]) -> dict[str, Any]:
    """The config, whose `fsdp_config` is for version 2 now. What has no place there is named and left out."""
    before = config.get("fsdp_config") or {}
    if not before:
        logger.info("No FSDP config found in the config file, skipping conversion...")
        return config
    if before.get("fsdp_version", 1) == 2:
        logger.warning("Config already specifies FSDP2, skipping conversion...")
        return config
    after: dict[str, Any] = {}
    for name, value in before.items():
        if name in _REMOVED:
            logger.warning("Argument %s has been removed in FSDP2, skipping this key...", name)
        elif name in _NOT_YET:
            logger.warning("Argument %s is not yet implemented in FSDP2, skipping this key...", name)
        elif name in _AS_BEFORE:
            after["fsdp_reshard_after_forward"] = _RESHARDS.get(value, value)
        else:
            after[name] = value
    config["fsdp_config"] = {**after, "fsdp_version": 2}
    return config


def load_config(config_file: str) -> dict[str, Any]:
    """What the file says."""
    found: dict[str, Any] | None = yaml.safe_load(Path(config_file).read_text(encoding="utf-8"))
    if not found:
        raise ValueError("Config file is empty")
    return found


def to_fsdp2_command_parser(subparsers: Any = None) -> ArgumentParser:
    """Its command line; as a subcommand `to-fsdp2` where subparsers are given."""
    about = "Convert an Accelerate config from FSDP1 to FSDP2"
    if subparsers is None:
        parser = ArgumentParser(description=about)
    else:
        parser = subparsers.add_parser("to-fsdp2", description=about)
        parser.set_defaults(func=to_fsdp2_command)
    parser.add_argument("--config_file", "--config-file", required=True, help="The file to convert")
    parser.add_argument("--overwrite", action="store_true", help="Write to it, or over the output file")
    parser.add_argument("--output_file", "--output-file", help="Default with --overwrite: the file itself")
    return parser


def to_fsdp2_command(args: Namespace) -> None:
    """Convert a file."""
    if not Path(args.config_file).exists():
        raise FileNotFoundError(f"Config file {args.config_file} not found")
    if not args.overwrite and args.output_file is None:
        raise ValueError("If --overwrite is not set, --output_file must be provided")
    if not args.overwrite and Path(args.output_file).exists():
        raise FileExistsError(f"Output file {args.output_file} already exists and --overwrite is not set")
    converted = convert_config_to_fsdp2(load_config(args.config_file))
    Path(args.output_file or args.config_file).write_text(yaml.dump(converted), encoding="utf-8")

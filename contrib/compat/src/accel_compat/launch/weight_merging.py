"""`accelerate merge-weights`: sharded weights, as one file."""

from __future__ import annotations

import logging
import shutil
import tempfile
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from accel_compat.environment.constants import SAFE_WEIGHTS_NAME, WEIGHTS_NAME
from accel_compat.launch.subcommands import subcommand_parser
from accel_compat.modeling.wrappers import save
from accel_compat.state.states import PartialState
from accel_core import commits, storage_at, stored_weights, write_weights

_logger = logging.getLogger("accelerate.utils.fsdp_utils")


def merge_fsdp_weights(
    checkpoint_dir: str,
    output_path: str,
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> None:
    """Write the weights of a folder of shards, whole. Collective.

    The main process writes. The folder is one that `save_fsdp_model` or Accelerate wrote under
    SHARDED_STATE_DICT, or a checkpoint of accel-core.

    Raises:
        ValueError: it is neither, or the merged weights would be removed with it.
    """
    source, target, state = Path(checkpoint_dir), Path(output_path), PartialState()
    is_ours = bool(commits(storage_at(source)))
    if not (is_ours or (source / ".metadata").is_file()):
        inner = sorted(each.parent.name for each in source.glob("*/.metadata"))
        meant = f"; there is {' and '.join(inner)} in it, pass one of these" if inner else ""
        raise ValueError(f"Tried to load from {source} but couldn't find a valid metadata file{meant}.")
    if remove_checkpoint_dir and target.resolve().is_relative_to(source.resolve()):
        raise ValueError(
            f"merge-weights: the merged weights in {target} would be removed with {source}\n"
            "give a folder outside of it, or leave out --remove_checkpoint_dir"
        )
    if state.is_main_process:
        target.mkdir(parents=True, exist_ok=True)
        if is_ours:
            weights = ((names, stored.tensor()) for names, stored in stored_weights(source))
            write_weights(target, weights, {}, "10GB", safe=safe_serialization)
        else:
            _merge(source, target, safe_serialization)
        if remove_checkpoint_dir:
            _logger.info("Removing old checkpoint directory %s", source)
            shutil.rmtree(source)
    state.wait_for_everyone()


def _merge(source: Path, target: Path, safe: bool) -> None:
    with tempfile.TemporaryDirectory(dir=target) as folder:
        whole = Path(folder, "whole")
        dcp_to_torch_save(source, whole)
        weights = torch.load(whole, map_location="cpu", weights_only=True)
    if len(weights) == 1 and isinstance(inner := next(iter(weights.values())), dict):
        weights = inner  # as {"model": {...}}
    file = target / (SAFE_WEIGHTS_NAME if safe else WEIGHTS_NAME)
    save(weights, file, safe_serialization=safe)
    _logger.info("Successfully merged FSDP weights and saved to %s", file)


def merge_command_parser(subparsers: Any = None) -> ArgumentParser:
    """Make the parser of `merge-weights`."""
    about = "Merge the weights of a folder of shards into one file."
    parser = subcommand_parser(subparsers, "merge-weights", about, merge_command)
    parser.add_argument("checkpoint_directory", help="Folder with sharded weights, or a checkpoint")
    parser.add_argument("output_path", help="Folder of the merged weights")
    parser.add_argument("--unsafe_serialization", action="store_true", help="Write pytorch_model.bin")
    parser.add_argument("--remove_checkpoint_dir", action="store_true", help="Remove the first folder then")
    return parser


def merge_command(args: Namespace) -> None:
    """Merge."""
    safe = not args.unsafe_serialization
    merge_fsdp_weights(args.checkpoint_directory, args.output_path, safe, args.remove_checkpoint_dir)

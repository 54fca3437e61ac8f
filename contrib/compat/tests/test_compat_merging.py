"""`accelerate merge-weights`: sharded weights become one file."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.commands.merge import merge_command, merge_command_parser
from accelerate.utils import merge_fsdp_weights
from safetensors.torch import load_file
from torch.distributed.checkpoint import state_dict_saver


@pytest.fixture
def sharded(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A folder that torch's checkpointing wrote, as `save_fsdp_model` has it written."""
    weights = {"weight": torch.rand(2, 3), "bias": torch.rand(2)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that one process saves
        state_dict_saver.save({"model": weights}, checkpoint_id=tmp_path / "ck" / "pytorch_model_fsdp_0")
    return tmp_path / "ck" / "pytorch_model_fsdp_0", weights


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_shards_are_merged_and_removed_if_asked(sharded, tmp_path):
    folder, weights = sharded
    merge_command(merge_command_parser().parse_args([str(folder), str(tmp_path), "--remove_checkpoint_dir"]))
    assert same(load_file(tmp_path / "model.safetensors"), weights)
    assert not folder.exists()


def test_without_safetensors_a_bin_is_written(sharded, tmp_path):
    folder, weights = sharded
    merge_fsdp_weights(folder, tmp_path, safe_serialization=False)
    assert same(torch.load(tmp_path / "pytorch_model.bin", weights_only=True), weights)


@pytest.mark.parametrize("inside", [".", "whole"])
def test_weights_that_would_be_removed_with_the_shards_are_refused(sharded, inside):
    folder, _ = sharded
    with pytest.raises(
        ValueError, match="would be removed with .*\ngive a folder outside of it, or leave out"
    ):
        merge_fsdp_weights(folder, folder / inside, remove_checkpoint_dir=True)
    assert (folder / ".metadata").exists()


def test_the_folder_above_is_refused_with_the_name_of_the_right_one(sharded, tmp_path):
    with pytest.raises(ValueError, match="there is pytorch_model_fsdp_0 in it, pass one of these"):
        merge_fsdp_weights(sharded[0].parent, tmp_path)


def test_a_checkpoint_of_accel_core_is_merged_too(tmp_path, run_command):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(3, 2))
    accelerator.save_state(tmp_path / "saved")
    merge_fsdp_weights(tmp_path / "saved", tmp_path / "merged")
    assert same(load_file(tmp_path / "merged" / "model.safetensors"), dict(model.state_dict()))
    merge_fsdp_weights(tmp_path / "saved", tmp_path / "bin", safe_serialization=False)
    assert same(
        torch.load(tmp_path / "bin" / "pytorch_model.bin", weights_only=True), dict(model.state_dict())
    )

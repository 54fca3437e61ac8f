"""transformers' Trainer on models that transformers shards as it loads them."""

from __future__ import annotations

import json
import os
import sys

import pytest
from peers import needs_accelerate
from test_compat_trainer import assert_equal, run, theirs

__all__ = ["theirs"]  # a fixture

pytestmark = [needs_accelerate, pytest.mark.timeout(500)]
SGD = {"optim": "sgd", "max_grad_norm": 0, "learning_rate": 0.1}
STILL = {"save_strategy": "no"}
SHARDED = {"fsdp": "full_shard", "fsdp_config": {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"}}
WHOLE = {"fsdp": "full_shard", "fsdp_config": {"version": 2, "state_dict_type": "FULL_STATE_DICT"}}


def layout(**sizes):
    return "--layout", json.dumps(sizes)


@pytest.mark.full
@pytest.mark.needs("accel-fsdp")
@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
def test_shards_train_to_the_numbers_of_accelerate(lora, tmp_path, run_command):
    words = (*layout(fsdp_size=2), *(["--lora"] if lora else []))
    expected = run(run_command, "llama", tmp_path / "theirs", 2, *words, ours=False, **STILL)
    found = run(run_command, "llama", tmp_path / "ours", 2, *words, ours=True, **STILL)
    assert_equal(found, expected, tolerance=1e-4)


@pytest.mark.full
@pytest.mark.needs("accel-fsdp")
@pytest.mark.parametrize("options", [{}, SGD], ids=["adamw", "sgd"])
@pytest.mark.parametrize(("world", "sizes"), [(2, {"tp_size": 2}), (4, {"fsdp_size": 2, "tp_size": 2})])
def test_split_layers_train_to_the_numbers_of_as_many_readers(world, sizes, options, tmp_path, run_command):
    readers = world // 2
    expected = run(run_command, "llama", tmp_path / "theirs", readers, ours=False, **STILL, **options)
    found = run(
        run_command, "llama", tmp_path / "ours", world, *layout(**sizes), ours=True, **STILL, **options
    )
    assert_equal(found, expected, tolerance=1e-4)


@pytest.mark.full
@pytest.mark.needs("accel-fsdp")
@pytest.mark.parametrize(
    ("world", "sizes", "arguments"),
    [
        (2, {"fsdp_size": 2}, SHARDED),
        (2, {"fsdp_size": 2}, WHOLE),
        (4, {"fsdp_size": 2, "tp_size": 2}, SHARDED),
    ],
    ids=["sharded", "whole", "split"],
)
def test_an_adopted_model_saves_and_resumes(world, sizes, arguments, tmp_path, run_command):
    words = (*layout(**sizes), "--adopt")
    whole = run(run_command, "llama", tmp_path / "run", world, *words, ours=True, **arguments)
    again = run(run_command, "llama", tmp_path / "run", world, *words, "--resume", ours=True, **arguments)
    assert_equal(again, whole, 4, tolerance=1e-4)


@pytest.mark.full
@pytest.mark.needs("accel-fsdp")
def test_whole_states_of_split_layers_are_refused(tmp_path, run_command):
    words = (*layout(fsdp_size=1, tp_size=2), "--adopt")
    with pytest.raises(AssertionError, match="SHARDED_STATE_DICT"):
        run(run_command, "llama", tmp_path / "run", 2, *words, ours=True, **WHOLE)


ADOPTED = """
import types, transformers
import accel_compat
transformers.__version__ = {version!r}
accel_compat.adopt(types.SimpleNamespace())
"""


@pytest.mark.parametrize(
    ("version", "said"), [("5.24.0", "transformers did not shard this"), ("6.0.0", "was tested with")]
)
def test_adopt_says_what_it_cannot_adopt(version, said, run_command):
    pytest.importorskip("transformers")
    done = run_command(
        [sys.executable, "-c", ADOPTED.format(version=version)],
        env={**os.environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode
    assert said in done.stderr

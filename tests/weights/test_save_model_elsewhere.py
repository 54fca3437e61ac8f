"""Saved by several ranks, and loaded by another library."""

from __future__ import annotations

import pytest
import torch
import weights_job
from safetensors.torch import load_file

from accel_core import Accelerator

pytestmark = pytest.mark.needs("accel-ddp")


def test_several_ranks_write_one_whole_model_under_its_own_names(tmp_path, run_processes):
    told = run_processes(weights_job.save_it, str(tmp_path), world=2, timeout=60)

    expected = ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert told == [("DistributedDataParallel", expected, expected * 2)] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Linear(6, 4))
    found = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())


def test_a_rank_that_cannot_write_goes_on_reading_and_all_hear_of_it(tmp_path, run_processes):
    told = run_processes(weights_job.fail_on_the_first_rank, str(tmp_path), world=2, timeout=60)

    assert [read for _, read in told] == [4, 4]
    assert all("rank 0: UnwritableError" in said and "NotADirectoryError" in said for said, _ in told)


def test_ranks_that_hold_whole_weights_each_get_them(run_processes):
    names = ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert (
        run_processes(weights_job.read_it, False, world=2, timeout=60) == [(names, names, True, "", "")] * 2
    )


def test_weights_in_parts_are_put_together_on_rank_0_and_the_others_say_how_to_get_them(run_processes):
    names = ["0.weight", "0.bias", "1.weight", "1.bias"]
    first, second = run_processes(weights_job.read_it, True, world=2, timeout=60)
    assert first == (names, names, True, "", "")
    found, all_of_it, _, shown, said = second
    assert (found, all_of_it) == ([], names)
    assert "get_state_dict(model, rank0_only=False)" in shown
    assert "0.weight" in said
    assert "rank0_only=False" in said


@pytest.mark.parametrize("kind", ["GPT2LMHeadModel", "T5ForConditionalGeneration", "BertForMaskedLM"])
@pytest.mark.parametrize("limit", ["10GB", "20KB"])
@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "torch"])
def test_transformers_loads_it(tmp_path, kind, limit, safe):
    transformers = pytest.importorskip("transformers")
    sizes = {
        "GPT2LMHeadModel": {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 50},
        "T5ForConditionalGeneration": {"num_layers": 2, "d_model": 16, "d_ff": 16, "d_kv": 8, "num_heads": 2},
        "BertForMaskedLM": {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16},
    }
    cls = getattr(transformers, kind)
    model = cls(cls.config_class(**{"vocab_size": 50, **sizes[kind]}))
    accelerator = Accelerator(cpu=True)
    try:
        accelerator.save_model(
            accelerator.prepare(model), tmp_path, max_shard_size=limit, safe_serialization=safe
        )
    finally:
        accelerator.end_training()
    model.config.save_pretrained(tmp_path)

    loaded, said = cls.from_pretrained(tmp_path, output_loading_info=True)

    assert not any(said[word] for word in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    expected = model.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())
    assert len(list(tmp_path.glob("*-of-*"))) == 0 or limit == "20KB"

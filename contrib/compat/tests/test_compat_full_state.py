"""transformers' Trainer saves a sharded model: the whole weights are on rank 0 only."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from peers import said

SAVED = """
import json, os, torch, torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

os.environ["FSDP_STATE_DICT_TYPE"] = "FULL_STATE_DICT"
config = GPT2Config(vocab_size=32, n_layer=2, n_head=2, n_embd=16, n_positions=8, tie_word_embeddings=False)
model = GPT2LMHeadModel(config)
fsdp = {"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"], "state_dict_type": "FULL_STATE_DICT"}
arguments = TrainingArguments(
    "run", per_device_train_batch_size=2, max_steps=1, save_strategy="no", report_to=[], use_cpu=True,
    disable_tqdm=True, fsdp="full_shard auto_wrap", fsdp_config=fsdp,
)
rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 8
trainer = Trainer(model, arguments, train_dataset=rows)
trainer.train()
gather, held = trainer.accelerator.get_state_dict, []

def get_state_dict(*args, **kwargs):
    state = gather(*args, **kwargs)
    devices = {str(each.device) for each in state.values()}
    held.append([sum(each.nbytes for each in state.values()), sorted(devices)])
    return state

trainer.accelerator.get_state_dict = get_state_dict
trainer.save_model("saved")
found = [None] * 2
dist.all_gather_object(found, held)
whole = sum(each.nbytes for each in GPT2LMHeadModel(config).state_dict().values())
loaded, said = GPT2LMHeadModel.from_pretrained("saved", output_loading_info=True)
print(json.dumps([found, whole, [*said["missing_keys"]]]))
"""


@pytest.mark.skipif(not find_spec("transformers"), reason="transformers is not here")
@pytest.mark.needs("accel-fsdp")
def test_trainer_holds_the_whole_weights_on_rank_0_only(run_processes, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    found, whole, missing = said(run_processes, SAVED, ours=True, processes=2)
    assert found == [[[whole, ["cpu"]]], [[0, []]]]
    assert not missing

"""transformers' Trainer in float8 by torchao, on accel-compat; needs both."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
import accel_compat; accel_compat.install()
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

set_seed(0)
sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
llama = LlamaForCausalLM(
    LlamaConfig(vocab_size=64, intermediate_size=64, bos_token_id=None, eos_token_id=None, **sizes)
)
before = {name: weight.clone() for name, weight in llama.named_parameters()}
rows = torch.randint(1, 64, (24, 16), generator=torch.Generator().manual_seed(1))
arguments = TrainingArguments(
    sys.argv[1], per_device_train_batch_size=4, max_steps=3, learning_rate=1e-3, save_strategy="no",
    report_to=[], use_cpu=True, disable_tqdm=True,
)
trainer = Trainer(llama, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
trainer.train()
print(trainer.accelerator.fp8_backend.value, type(llama.model.layers[0].mlp.up_proj).__name__)
print("still:", [name for name, weight in llama.named_parameters() if torch.equal(weight, before[name])])
"""


@pytest.mark.timeout(400)
@pytest.mark.needs("accel-compat", "transformers")
def test_the_trainer_of_transformers_trains_every_weight_in_float8(tmp_path: Path, run_command) -> None:
    """`accelerate launch --mixed_precision fp8` sets this variable."""
    env = {**os.environ, "ACCELERATE_MIXED_PRECISION": "fp8", "PYTHONWARNINGS": "ignore"}
    done = run_command(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-2:] == ["AO Float8Linear", "still: []"]

"""transformers' Trainer on tiny models with random weights; prints what it logged as JSON, on rank 0.

`trainer_script.py MODEL FOLDER [--ours] [--resume] [--lora] [--sft] [--arguments JSON]`; with `--lora` peft
adapts the model, with `--sft` trl's SFTTrainer trains it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("folder")
parser.add_argument("--ours", action="store_true")
parser.add_argument("--resume", action="store_true")
parser.add_argument("--lora", action="store_true")
parser.add_argument("--sft", action="store_true")
parser.add_argument("--layout", help="JSON: transformers shards the model so as it loads it")
parser.add_argument("--adopt", action="store_true")
parser.add_argument("--arguments", default="{}")
asked = parser.parse_args()
if asked.ours:
    import accel_compat

    accel_compat.install()

import torch  # noqa: E402
from transformers import (  # noqa: E402
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

TOKENS, LENGTH = 64, 16
SMALL = {"vocab_size": TOKENS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
NO_END = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def model() -> torch.nn.Module:
    if asked.model == "gpt2":
        sizes = {"vocab_size": TOKENS, "n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": LENGTH}
        return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0, attn_pdrop=0, embd_pdrop=0, **NO_END))
    if asked.model == "llama":
        return LlamaForCausalLM(LlamaConfig(**SMALL, intermediate_size=64, num_key_value_heads=2, **NO_END))
    still = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    return BertForSequenceClassification(BertConfig(**SMALL, **still, intermediate_size=64, num_labels=3))


def loaded(base: torch.nn.Module) -> torch.nn.Module:
    """The model, as transformers shards it while it loads it."""
    from transformers.distributed import DistributedConfig

    folder = f"{asked.folder}/model"
    base.save_pretrained(folder)  # by rank 0: the arguments have started the processes' group
    torch.distributed.barrier()
    return type(base).from_pretrained(
        folder, distributed_config=DistributedConfig(**json.loads(asked.layout))
    )


class Tokens(torch.utils.data.Dataset):
    def __init__(self, count: int, seed: int) -> None:
        self.tokens = torch.randint(1, TOKENS, (count, LENGTH), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.tokens[index]
        labels = tokens[0] % 3 if asked.model == "bert" else tokens
        return {"input_ids": tokens, "labels": labels}


def adapted(base: torch.nn.Module) -> torch.nn.Module:
    from peft import LoraConfig, get_peft_model

    if asked.model == "llama":
        return get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    return get_peft_model(base, LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))


def by_trl() -> tuple[type[Trainer], type[TrainingArguments], dict[str, object]]:
    """The classes, and the arguments that only SFTTrainer takes."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = {"<pad>": 0, **{str(number): number for number in range(1, TOKENS)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="1")
    return SFTTrainer, SFTConfig, {"processing_class": fast}


def data(count: int, seed: int) -> object:
    if not asked.sft:
        return Tokens(count, seed)
    from datasets import Dataset

    return Dataset.from_list([{"input_ids": row.tolist()} for row in Tokens(count, seed).tokens])


set_seed(0)
trainer_class, arguments_class, more = by_trl() if asked.sft else (Trainer, TrainingArguments, {})
settings = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "num_train_epochs": 2,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "eval_strategy": "epoch",
    "save_strategy": "steps",
    "save_steps": 4,
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
    "seed": 3,
}
arguments = arguments_class(asked.folder, **{**settings, **json.loads(asked.arguments)})
trained = loaded(model()) if asked.layout else model()
if asked.adopt:
    accel_compat.adopt(trained)
trained = adapted(trained) if asked.lora else trained
trainer = trainer_class(trained, arguments, train_dataset=data(50, 1), eval_dataset=data(13, 2), **more)
trainer.train(resume_from_checkpoint=f"{asked.folder}/checkpoint-4" if asked.resume else None)
predicted = trainer.predict(trainer.eval_dataset)
if trainer.is_world_process_zero():
    keys = ("step", "loss", "grad_norm", "eval_loss")
    logged = [{key: entry[key] for key in keys if key in entry} for entry in trainer.state.log_history]
    kind = str(trainer.accelerator.distributed_type.value)
    shown = {"logged": logged, "predicted": predicted.metrics["test_loss"], "kind": kind}
    sys.stdout.write("\n" + json.dumps(shown) + "\n")
if not asked.ours:  # Accelerate leaves its process group alone, and now and then a process aborts for it
    sys.stdout.flush()
    os._exit(0)

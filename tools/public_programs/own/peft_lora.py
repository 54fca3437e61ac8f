"""LoRA by peft in a loop of Accelerate, with the adapter saved by its own means."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import load_dataset
from peft import LoraConfig, TaskType, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, get_linear_schedule_with_warmup

set_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
tokenizer = AutoTokenizer.from_pretrained("tiny-llama")
model = AutoModelForCausalLM.from_pretrained("tiny-llama")
lora = LoraConfig(task_type=TaskType.CAUSAL_LM, r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
model = get_peft_model(model, lora)
with accelerator.main_process_first():
    texts = load_dataset("data/sft", split="train")


def collate(rows):
    batch = tokenizer([row["text"] for row in rows], padding=True, return_tensors="pt")
    return {**batch, "labels": batch["input_ids"]}


loader = DataLoader(texts, batch_size=4, shuffle=True, collate_fn=collate)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = get_linear_schedule_with_warmup(optimizer, 2, 12)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
for _ in range(2):
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
accelerator.wait_for_everyone()
state = accelerator.get_state_dict(model)
unwrapped = accelerator.unwrap_model(model)
unwrapped.save_pretrained("final", state_dict=state, is_main_process=accelerator.is_main_process)

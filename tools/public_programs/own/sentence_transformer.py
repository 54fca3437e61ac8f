"""Embeddings of random pairs by SentenceTransformerTrainer, saved and evaluated."""

from datasets import load_dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
)
from transformers import set_seed

set_seed(0)
pairs = load_dataset("nyu-mll/glue", "mrpc").select_columns(["sentence1", "sentence2"])
model = SentenceTransformer("bert-base-cased", device="cpu")
options = SentenceTransformerTrainingArguments(
    output_dir="out",
    max_steps=4,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    eval_strategy="steps",
    eval_steps=2,
    logging_steps=1,
    report_to="none",
    use_cpu=True,
)
trainer = SentenceTransformerTrainer(
    model,
    options,
    train_dataset=pairs["train"],
    eval_dataset=pairs["validation"],
    loss=losses.MultipleNegativesRankingLoss(model),
)
trainer.train()
model.save_pretrained("final")

"""A cross-encoder on random pairs by CrossEncoderTrainer."""

from datasets import Value, load_dataset
from sentence_transformers.cross_encoder import (
    CrossEncoder,
    CrossEncoderTrainer,
    CrossEncoderTrainingArguments,
    losses,
)
from transformers import set_seed

set_seed(0)
pairs = load_dataset("nyu-mll/glue", "mrpc", split="train").select_columns(
    ["sentence1", "sentence2", "label"]
)
pairs = pairs.cast_column("label", Value("float32"))
model = CrossEncoder("bert-base-cased", num_labels=1, device="cpu")
options = CrossEncoderTrainingArguments(
    output_dir="out",
    max_steps=4,
    per_device_train_batch_size=4,
    logging_steps=1,
    report_to="none",
    use_cpu=True,
)
trainer = CrossEncoderTrainer(model, options, train_dataset=pairs, loss=losses.BinaryCrossEntropyLoss(model))
trainer.train()
model.save_pretrained("final")

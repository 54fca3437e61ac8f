"""transformers' Trainer: trains, evaluates, saves, resumes from its checkpoint and predicts."""

from datasets import load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

set_seed(0)
tokenizer = AutoTokenizer.from_pretrained("bert-base-cased")
data = load_dataset("nyu-mll/glue", "mrpc")
data = data.map(lambda rows: tokenizer(rows["sentence1"], rows["sentence2"], truncation=True), batched=True)


def trainer(steps: int) -> Trainer:
    options = TrainingArguments(
        "out",
        max_steps=steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=3,
        save_steps=3,
        logging_steps=1,
        label_smoothing_factor=0.1,
        report_to="none",
        use_cpu=True,
    )
    model = AutoModelForSequenceClassification.from_pretrained("bert-base-cased")
    return Trainer(
        model,
        options,
        train_dataset=data["train"],
        eval_dataset=data["validation"],
        data_collator=DataCollatorWithPadding(tokenizer),
    )


trainer(6).train()
resumed = trainer(9)
resumed.train(resume_from_checkpoint=get_last_checkpoint("out"))
resumed.save_model("final")
print(resumed.predict(data["validation"]).metrics["test_loss"])

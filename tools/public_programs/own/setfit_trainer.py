"""A few-shot classifier by SetFit's Trainer."""

from datasets import Dataset
from sentence_transformers import SentenceTransformer
from setfit import SetFitModel, Trainer, TrainingArguments
from sklearn.linear_model import LogisticRegression
from transformers import set_seed

set_seed(0)
body = SentenceTransformer("bert-base-cased", device="cpu")
model = SetFitModel(model_body=body, model_head=LogisticRegression())
texts = ["the red cat", "a red bird", "one blue dog", "two blue cat", "the blue fox", "a red fox"]
data = Dataset.from_dict({"text": texts, "label": [0, 0, 1, 1, 1, 0]})
options = TrainingArguments(
    output_dir="out", batch_size=4, max_steps=4, num_epochs=1, report_to="none", logging_steps=1
)
trainer = Trainer(model=model, args=options, train_dataset=data)
trainer.train()

"""A classifier of random points by pytorch-accelerated's Trainer, with a schedule and an evaluation."""

from functools import partial

import torch
from accelerate.utils import set_seed
from pytorch_accelerated import Trainer
from torch.utils.data import TensorDataset

set_seed(0)
points = torch.randn(100, 4)
data = TensorDataset(points, (points.sum(1) > 0).long())
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 2))


class Points(Trainer):
    def get_default_train_dl_kwargs(self, batch_size):
        return {"shuffle": True, "batch_size": batch_size}

    def get_default_eval_dl_kwargs(self, batch_size):
        return {"batch_size": batch_size}


trainer = Points(model, torch.nn.functional.cross_entropy, torch.optim.AdamW(model.parameters(), lr=0.01))
trainer.train(
    train_dataset=data,
    eval_dataset=TensorDataset(*data[:37]),
    num_epochs=2,
    per_device_batch_size=8,
    gradient_accumulation_steps=2,
    create_scheduler_fn=partial(torch.optim.lr_scheduler.StepLR, step_size=3),
)
trainer.save_checkpoint("checkpoint.pt")

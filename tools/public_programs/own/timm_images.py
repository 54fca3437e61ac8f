"""A timm model, optimizer, schedule and augmentation in a loop of Accelerate."""

from accelerate import Accelerator
from accelerate.utils import set_seed
from timm import create_model
from timm.data import create_dataset, create_transform
from timm.data.mixup import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch.utils.data import DataLoader

set_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
data = create_dataset("", "classes", split="train")
data.transform = create_transform(32, is_training=True, auto_augment="rand-m9-mstd0.5", re_prob=0.3)
loader = DataLoader(data, batch_size=4, shuffle=True, drop_last=True)
model = create_model("resnet10t", num_classes=2, drop_rate=0.1, drop_path_rate=0.1)
optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
schedule = CosineLRScheduler(optimizer, t_initial=3, warmup_t=1)
mixup, criterion = Mixup(mixup_alpha=0.8, num_classes=2), SoftTargetCrossEntropy()
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(3):
    for images, targets in loader:
        with accelerator.accumulate(model):
            mixed, soft = mixup(images, targets)
            accelerator.backward(criterion(model(mixed), soft))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    schedule.step(epoch + 1)
accelerator.wait_for_everyone()
accelerator.save_model(model, "final")

"""A small training under DeepSpeed's own engine, and under accel-core, in processes of their own."""

from __future__ import annotations

import os
import pickle
import warnings
from pathlib import Path

import torch
from torch import nn

STEPS = 3


class Net(nn.Module):
    """Tied and frozen weights, a buffer, and sizes that no number of ranks divides."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(7, 5)
        self.fixed = nn.Linear(5, 5).requires_grad_(requires_grad=False)
        self.there, self.back = nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)
        self.back.weight = self.there.weight
        self.last = nn.Linear(5, 3)
        self.register_buffer("seen", torch.full((3,), float(seed)))

    def forward(self, x):
        return self.last(self.back(torch.tanh(self.there(self.fixed(self.first(x))))))


def adamw(model, lr):
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=lr)


def train(model, backward, steps):
    losses = []
    for step in steps:
        x = torch.randn(4, 7, generator=torch.Generator().manual_seed(step))
        loss = model(x.to(next(model.parameters()).dtype)).float().square().mean()
        backward(loss)
        losses.append(loss.item())
    return losses


def deepspeed_saves(folder, config):
    """(What DeepSpeed says its masters and moments are, the losses that follow)."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    warnings.simplefilter("ignore")
    import deepspeed

    torch.distributed.init_process_group("gloo")
    model = Net(0)
    told = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
    }
    optimizer = adamw(model, 0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config={**told, **config})

    def backward(loss):
        engine.backward(loss)
        engine.step()

    train(engine, backward, range(STEPS))
    engine.save_checkpoint(folder, client_state={"epoch": 3})
    return _told(engine), train(engine, backward, range(STEPS, 2 * STEPS))


def _told(engine):
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if not hasattr(engine.optimizer, "optimizer"):
        return {}
    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):
        # 0.19.8 links the state of all groups once the first is stepped, when the others have none yet.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    found = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            found[f"model/{name}"] = safe_get_full_fp32_param(parameter)
            for key in ("exp_avg", "exp_avg_sq"):
                found[f"optimizer/{name}/{key}"] = safe_get_full_optimizer_state(parameter, key)
    return {key: tensor.clone() for key, tensor in found.items() if tensor is not None}


def to_universal(folder, target):
    os.environ["DS_ACCELERATOR"] = "cpu"
    warnings.simplefilter("ignore")
    from types import SimpleNamespace

    from deepspeed.checkpoint import ds_to_universal

    given = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    tag = Path(folder) / (Path(folder) / "latest").read_text()
    ds_to_universal.main(
        SimpleNamespace(input_folder=str(tag), output_folder=target, inject_missing_state=True, **given)
    )


def core_is_fresh(folder):
    from accel_core import Accelerator

    accelerator = Accelerator(cpu=True)
    model = Net(1)
    accelerator.prepare(model, adamw(model, 0.5))
    accelerator.save_state(folder)


def core_imports(folder, into):
    """(Losses that follow, what was left out)."""
    from accel_checkpoint_tools import load_deepspeed
    from accel_core import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(module := Net(1), adamw(module, 0.5))
    left_out = load_deepspeed(accelerator, folder, into)

    def backward(loss):
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    return train(model, backward, range(STEPS, 2 * STEPS)), left_out


class Harm:
    def __reduce__(self):
        return Path.touch, (Path("harmed"),)


def poison(file):
    """Code in the place of a value."""
    saved = torch.load(file, weights_only=False)
    torch.save({**saved, "client": Harm()}, file, pickle_module=pickle)

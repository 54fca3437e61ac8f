"""The settings that DeepSpeed's and transformers' documentation show are read, and train on the CPU."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from accel_core import Accelerator
from accel_deepspeed import DeepSpeedPlugin, DummyOptim, DummyScheduler

pytestmark = pytest.mark.timeout(600)

ADAM = {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}}
AUTO_ADAM = {
    "type": "AdamW",
    "params": {"lr": "auto", "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": "auto"},
}
WARMUP = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000},
}
AUTO_WARMUP = {
    "type": "WarmupDecayLR",
    "params": dict.fromkeys(
        ("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto"
    ),
}
BATCHES = dict.fromkeys(
    ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"
)
CPU, PINNED = {"device": "cpu"}, {"device": "cpu", "pin_memory": True}

DOCUMENTED: dict[str, dict[str, Any]] = {
    # DeepSpeed: config-json, tutorials zero and zero-offload
    "optimizer, scheduler": {"optimizer": ADAM, "scheduler": WARMUP},
    "zero, stage 1": {"zero_optimization": {"stage": 1, "reduce_bucket_size": 5e8}},
    "zero, stage 2": {
        "zero_optimization": {
            "stage": 2,
            "contiguous_gradients": True,
            "overlap_comm": True,
            "reduce_scatter": True,
            "reduce_bucket_size": 5e8,
            "allgather_bucket_size": 5e8,
        }
    },
    "zero, infinity": {
        "zero_optimization": {
            "stage": 3,
            "contiguous_gradients": True,
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
            "stage3_prefetch_bucket_size": 1e7,
            "stage3_param_persistence_threshold": 1e5,
            "reduce_bucket_size": 1e7,
            "sub_group_size": 1e9,
            "offload_optimizer": CPU,
            "offload_param": CPU,
        }
    },
    "zero-offload": {
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": CPU,
            "contiguous_gradients": True,
            "overlap_comm": True,
        }
    },
    "bf16": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}},
    # transformers, and the templates that trainers take from it
    "transformers, stage 2": {
        "bf16": {"enabled": "auto"},
        "optimizer": AUTO_ADAM,
        "scheduler": AUTO_WARMUP,
        "zero_optimization": {
            "stage": 2,
            "allgather_partitions": True,
            "allgather_bucket_size": 2e8,
            "overlap_comm": True,
            "reduce_scatter": True,
            "reduce_bucket_size": 2e8,
            "contiguous_gradients": True,
        },
        "gradient_clipping": "auto",
        **BATCHES,
    },
    "transformers, stage 3": {
        "bf16": {"enabled": "auto"},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": PINNED,
            "offload_param": PINNED,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": 1e9,
            "reduce_bucket_size": 1e6,
            "stage3_prefetch_bucket_size": 0.94e6,
            "stage3_param_persistence_threshold": 1e4,
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "gradient_clipping": "auto",
        **BATCHES,
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
    },
    "zero++": {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 1, "overlap_comm": True}},
    "autocast": {
        "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
        "zero_optimization": {"stage": 2},
    },
}


def trains(given: Any) -> list[float]:
    warnings.simplefilter("ignore")
    accelerator = Accelerator(cpu=True, plugins=[DeepSpeedPlugin(hf_ds_config=given)])
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    x = torch.randn(24, 6)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)
    told = json.loads(Path(given).read_text()) if isinstance(given, str) else given
    parameters = model.parameters()
    optimizer: Any = DummyOptim(parameters) if "optimizer" in told else torch.optim.AdamW(parameters, lr=0.01)
    objects = [model, optimizer, loader]
    if "scheduler" in told:
        objects.append(DummyScheduler(optimizer, total_num_steps=20, warmup_num_steps=2))
    model, optimizer, loader, *rates = accelerator.prepare(*objects)
    losses = []
    for _ in range(3):
        for inputs, target in loader:
            loss = torch.nn.functional.mse_loss(
                model(inputs.to(next(model.parameters()).dtype)).float(), target
            )
            accelerator.backward(loss)
            for each in (optimizer, *rates):
                each.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    accelerator.end_training()
    return losses


def compiles(given: dict[str, Any]) -> bool:
    """Return True for settings whose optimizer is an extension that is compiled for minutes."""
    return "optimizer" in given or "offload_optimizer" in given.get("zero_optimization", {})


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.full] if compiles(given) else [])
        for name, given in DOCUMENTED.items()
    ],
)
def test_documented_settings_train(name: str, run_processes) -> None:
    for losses in run_processes(trains, DOCUMENTED[name], world=1, timeout=400):
        assert sum(losses[-6:]) < sum(losses[:6]) or "optimizer" in DOCUMENTED[name]


def test_a_second_share_within_a_node_changes_no_number(run_processes) -> None:
    """ZeRO++'s hpZ: backward gathers from the node's own ranks, here from both."""
    plain = {"stage": 3, "stage3_param_persistence_threshold": 0}

    expected, found = (
        run_processes(trains, {"zero_optimization": zero}, timeout=200)
        for zero in (plain, {**plain, "zero_hpz_partition_size": 2})
    )

    assert found == expected


def test_they_are_read_from_a_file_with_comments(tmp_path: Path) -> None:
    pytest.importorskip("hjson")
    file = tmp_path / "ds_config.json"
    file.write_text("// as DeepSpeed reads it\n" + json.dumps(DOCUMENTED["zero, stage 2"]))

    assert DeepSpeedPlugin(hf_ds_config=str(file)).deepspeed_config == DOCUMENTED["zero, stage 2"]

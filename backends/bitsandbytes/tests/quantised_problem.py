"""A small language model, and its checkpoint."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from accel_big_models import empty_weights
from accel_bitsandbytes import BnbQuantizationConfig
from accel_core import InitProcessGroupKwargs
from accel_testing.patience import patience

KINDS: dict[str, dict[str, Any]] = {
    "int8": {"load_in_8bit": True},
    "fp4": {"load_in_4bit": True},
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4, double": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
    },
    "nf4 in bfloat16": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_quant_storage": torch.bfloat16,
    },
}


def config(kind: str, **more: Any) -> BnbQuantizationConfig:
    options = dict(KINDS[kind])
    if "load_in_4bit" in options:
        options["bnb_4bit_compute_dtype"] = torch.float32
    return BnbQuantizationConfig(**options, **{"torch_dtype": torch.float32, **more})


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up = nn.Linear(64, 128)
        self.down = nn.Linear(128, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(96, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(64, 96, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


QUANTISED = [f"blocks.{number}.{name}" for number in range(3) for name in ("up", "down")]


def model(seed: int = 0, tied: bool = False) -> Model:
    torch.manual_seed(seed)
    return Model(tied)


def empty(tied: bool = False) -> Model:
    with empty_weights():
        return Model(tied)


def saved(folder: Path, tied: bool = False) -> Path:
    file = folder / "model.safetensors"
    state = model(tied=tied).state_dict()
    save_file({name: tensor for name, tensor in state.items() if not (tied and name == "head.weight")}, file)
    return file


def ids(seed: int = 5, rows: int = 2) -> torch.Tensor:
    return torch.randint(0, 96, (rows, 7), generator=torch.Generator().manual_seed(seed))


TIMEOUT = InitProcessGroupKwargs(timeout=timedelta(seconds=patience(60)))
